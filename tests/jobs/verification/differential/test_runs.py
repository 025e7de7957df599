"""The differential run: a short one on three ranks, what it prints, and the draws that it repeats."""

from __future__ import annotations

import pytest
import torch

from distconv import cli
from distconv.jobs.verification.differential import command
from distconv.jobs.verification.differential.draw import Draw
from distconv.jobs.verification.differential.runs import DifferentialRun, draw_case, drawn, summary, table
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.verdicts import BAD, EXACT, Verdict
from tests.jobs.command_lines import commands_in, option_tests


def lines(comm, seed, kind, count):
    run = DifferentialRun(comm)
    return [line for _, cases in drawn(seed, kind, range(count)) for case in cases for line in run.lines(kind, case)]


@pytest.mark.long
@pytest.mark.ranks(3)
@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize(("kind", "count"), [("operators", 40), ("networks", 8)])
def test_a_short_run_finds_no_difference(comm, kind, count):
    found = lines(comm, 11, kind, count)
    assert not [line for line in found if line.verdict in BAD]
    assert sum(line.verdict in EXACT for line in found) > 0.7 * count


@pytest.mark.ranks(2)
def test_what_is_wrong_is_printed_with_the_command_that_repeats_it(comm, monkeypatch, capsys):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    assert cli.main(["verify", "differential", "--cases", "4", "--only", "networks"]) == 1
    out = capsys.readouterr().out
    assert comm.rank or "mpiexec -n 2 distconv verify differential --seed 0 --only networks --case " in out


def test_a_case_is_the_same_whenever_it_is_drawn():
    first, again, other = (draw_case(seed, 7, "all") for seed in (3, 3, 4))
    assert (first.operator, first.option) == (again.operator, again.option)
    assert (first.operator, first.option) != (other.operator, other.option)
    assert torch.equal(Draw(1, 2).tensor(5), Draw(1, 2).tensor(5))


def test_about_a_quarter_of_all_cases_are_networks():
    networks = {draw_case(5, index, "networks").operator for index in range(40)}
    drawn_networks = sum(draw_case(5, index, "all").operator in networks for index in range(40))
    assert 4 <= drawn_networks <= 16


def line(operator, verdict, text="", moved=0):
    return Line("all", operator, "case 3: x: 2 drawn", "drawn", "h=2", 2, verdict, text, moved)


LINES = [
    line("add", Verdict.EXACT), line("add", Verdict.REDISTRIBUTES, moved=8), line("add", Verdict.REPLICATES),
    line("add", Verdict.REFUSED, "too small"), line("sub", Verdict.OTHER_WORDS, "torch says no"),
    line("sub", Verdict.RAISES, "no rule; gather it"), line("sub", Verdict.RAISES, "no rule; gather it"),
    line("sub", Verdict.HANGS), line("mul", Verdict.WRONG, "y differs"), line("mul", Verdict.UNCLEAR, "KeyError"),
    line("mul", Verdict.INFINITE, "NaN"),
]  # fmt: skip


def test_counts_and_reasons_are_printed_in_full():
    assert summary(LINES) == (
        "11 cases: 3 exact, 1 refused as torch does, 1 in other words, 2 unsupported, 3 silent differences"
    )
    assert summary(LINES[:1]) == "1 cases: 1 exact, 0 refused as torch does, 0 unsupported, 0 silent differences"
    assert table(LINES).splitlines() == [
        "                           exact  refused  unsupported  WRONG",
        "add                            3        1            0      0",
        "mul                            0        0            0      2",
        "sub                            0        1            2      1",
        "2 times raises: no rule; gather it",
        "1 times refused in other words: torch says no",
    ]


@pytest.mark.parametrize(
    ("words", "drawn", "printed", "code"),
    [
        ("--seed 4 --first 5 --cases 2", (4, "all", [5, 6]), (8, 9, 7), 1),
        ("--case 17 --only networks", (0, "networks", [17]), range(11), 1),
        ("--case 17", (0, "all", [17]), (0,), 0),
    ],
)
def test_the_command_prints_what_is_wrong_or_single(monkeypatch, capsys, words, drawn, printed, code):
    lines = LINES if code else LINES[:1]

    def run(job, groups, path, tell):
        assert job.comm == command.MPI.COMM_WORLD and job._watch._limit_s == 60 and path is None
        assert groups == drawn
        tell(lines)
        return lines

    monkeypatch.setattr(command.launch, "run", run)
    monkeypatch.setattr(command, "drawn", lambda seed, kind, indices: (seed, kind, list(indices)))
    assert cli.main(["verify", "differential", *words.split()]) == code
    out = capsys.readouterr().out
    only = " --only networks" if "networks" in words else ""
    repeat = f"  mpiexec -n 1 distconv verify differential --seed {drawn[0]}{only} --case 3\n"
    for number in printed:
        each = lines[number]
        assert f"{each.verdict.value}: case 3: {each.operator} x: 2 drawn on h=2: {each.text}\n{repeat}" in out
    assert out.count("  mpiexec -n 1") == len(printed)
    assert out.endswith(f"{table(lines)}\n1 ranks, seed {drawn[0]}: {summary(lines)}\n")


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
