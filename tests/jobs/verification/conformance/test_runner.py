"""The conformance run: a part of its table, what it must notice, its page, and the count of bytes it reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distconv as dc
from distconv import cli, dispatch
from distconv.communication.transport import allreduce, counted
from distconv.errors import UnsupportedOperation
from distconv.jobs.verification.conformance import page, report
from distconv.jobs.verification.conformance.case import Input, case
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.layouts import KINDS, layouts
from distconv.jobs.verification.conformance.runner import Run, Verdict, names_a_way_out
from tests.distconv.layouts import grid_over, normal

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "evidence" / "conformance.md"
X = Input("N C H W")


def riders_bytes(ranks: int) -> int:
    """Of the digest of weights that rides with their gradients: 32 bits in pieces, and their squares."""
    return 2 * {2: 3, 3: 3, 4: 3, 6: 4, 8: 4}[ranks] * 8


@pytest.mark.ranks(4)
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("family", TABLE)
def test_a_part_of_the_table_has_nothing_wrong(comm, family):
    run = Run(comm)
    lines = [line for case in TABLE[family][::14] for line in run.lines(family, case)]
    assert not [line for line in lines if line.verdict is Verdict.WRONG]
    assert any(line.verdict is Verdict.EXACT for line in lines)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_table_is_as_large_as_promised(ranks):
    cases = [case for cases in TABLE.values() for case in cases]
    assert len({case.operator for case in cases}) >= 60
    found = [layout.kind for case in cases for layout in layouts(case, ranks)]
    assert len(found) >= 400
    assert ranks not in (4, 6, 8) or set(found) == set(KINDS)


def test_no_two_rows_of_the_table_have_one_name():
    for cases in TABLE.values():
        names = [(case.operator, case.option) for case in cases]
        assert len(names) == len(set(names))


# -- what it must notice ------------------------------------------------------------------------------------------


def verdicts(comm, function, *inputs):
    lines = list(Run(comm).lines("none", case("none", "", function, *(inputs or (X,)))))
    assert len(set(comm.allgather(str(lines)))) == 1
    return {line.layout: line for line in lines}


@pytest.mark.ranks(4)
def test_it_says_what_is_exact_and_what_redistributes(comm):
    found = verdicts(comm, lambda x: x.flatten(1) * 2)
    assert found["samples"].verdict is Verdict.EXACT
    assert found["samples"].moved_bytes == 0
    line = found["height"]
    assert line.verdict is Verdict.REDISTRIBUTES
    # 7 rows over 4 ranks become whole on each: every block goes to the three others. Back nothing needs to move.
    assert line.moved_bytes == 5 * 4 * 7 * 9 * 8 * 3


@pytest.mark.ranks(4)
def test_halos_and_sums_are_no_redistribution(comm):
    found = verdicts(comm, lambda x: torch.nn.functional.max_pool2d(x, 3, 1, 1).mean())
    assert found["height"].verdict is Verdict.EXACT
    assert found["height"].halo_bytes > 0
    assert found["height"].reduced_bytes == 8 * 4


@pytest.mark.ranks(2, 3)
def test_a_gradient_that_is_not_summed_is_wrong(comm, monkeypatch):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    weight = Input("c 1 1", layout="plain")
    found = verdicts(comm, lambda x, w: x * w, X, weight)
    assert found["height"].verdict is Verdict.WRONG
    assert "dL/dx1" in found["height"].text
    assert found["nothing split"].verdict is Verdict.EXACT


def unwilling(x):
    """A function of a user's that only the tests know."""
    return torch.overrides.handle_torch_function(unwilling, (x,), x) if isinstance(x, dc.DistTensor) else x * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("error", "on", "verdict", "text"),
    [
        (UnsupportedOperation("no rule; gather it first"), (0, 1), Verdict.RAISES, "no rule; gather it first"),
        (UnsupportedOperation("it has no rule"), (0, 1), Verdict.WRONG, "names no way out: it has no rule"),
        (UnsupportedOperation("no rule; gather it first"), (1,), Verdict.WRONG, "ranks differ: rank 0"),
        (KeyError("h"), (0, 1), Verdict.WRONG, "every rank fails with KeyError"),
    ],
)
def test_an_error_counts_only_if_it_is_ours_everywhere_and_helps(comm, monkeypatch, error, on, verdict, text):
    def operator(x):
        if comm.rank in on:
            raise error
        return x * 2

    monkeypatch.setitem(dispatch._RULES, unwilling, dispatch.Rule(operator))
    line = verdicts(comm, unwilling)["height"]
    assert line.verdict is verdict
    assert text in line.text


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("torch.sort has no distributed rule; gather the tensor first (dc.gather(x)) and apply it to the whole", True),
        ("its channels are split over 'c'; replicate that dimension first", True),
        ("convolution of a plain tensor with a distributed weight: scatter the input first", True),
        ("torch.Tensor.gather has no distributed rule", False),
        ("batch norm needs a distributed input whose channels are not split", False),
    ],
)
def test_a_way_out_is_an_imperative(text, helps):
    assert names_a_way_out(text) is helps


# -- the command and the page -------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_command_prints_lines_and_totals_and_writes_them(comm, shared_tmp_path, capsys):
    found, written = shared_tmp_path / "found.json", shared_tmp_path / "page.md"
    arguments = ["--operator", "relu6", "sum", "--json", str(found), "--page", str(written)]
    assert cli.main(["verify", "conformance", *arguments]) == 0
    out = capsys.readouterr().out
    if comm.rank:
        assert out == ""
        return
    assert "exact          relu6 activation: all" in out
    lines = report.read_json(found)
    assert f"2 ranks: 2 operators, {len(lines)} cases: " in out
    assert json.loads(found.read_text())[0]["verdict"] == "exact"
    activation = [line for line in lines if (line.operator, line.option) == ("relu6", "activation")]
    row = rows(written.read_text())[activation[0].family, "relu6", "activation"]
    assert row == {line.layout for line in activation}


@pytest.mark.mpi
@pytest.mark.time_limit(200)
def test_the_command_starts_a_job_for_each_rank_count_and_writes_one_page(tmp_path):
    written = tmp_path / "page.md"
    asked = ["--operator", "relu6", "--ranks", "1,2", "--page", str(written)]
    command = [sys.executable, "-m", "distconv", "verify", "conformance", *asked]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "== 2 ranks" in ended.stdout and "2 ranks: 1 operators" in ended.stdout
    assert "--page docs/evidence/conformance.md --ranks 1,2 -->" in written.read_text()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "fly"], "the table has no operator 'fly'; it has "),
        (["--json", "/nowhere/found.json"], "--json /nowhere/found.json: there is no folder /nowhere"),
        (["--ranks", "2"], "--ranks starts jobs by itself; call it without mpiexec"),
    ],
)
@pytest.mark.parametrize("name", [["conformance"], ["verify", "conformance"]])
def test_bad_input_is_one_line(comm, capsys, name, arguments, message):
    assert cli.main([*name, *arguments]) == 2
    error = capsys.readouterr().err
    assert error == "" if comm.rank else (message in error and error.count("\n") == 1)


def rows(text):
    """Kinds of layouts that each row of a page has a sign for, by family, operator and option."""
    kinds = {heading: kind for kind, (heading, _) in page.SHORT.items()}
    found, family, heads = {}, "", []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            family = line[3:]
        elif line.startswith("| operator |"):
            heads = cells[2:]
        elif line.startswith("| `") and family in TABLE:
            signs = {kinds[head] for head, cell in zip(heads, cells[2:], strict=True) if cell}
            operator, option = (cell.strip("`").replace(page.BAR, "|") for cell in cells[:2])
            found[family, operator, option] = signs
    return found


def test_the_page_has_the_rows_and_cells_of_the_table():
    text = PAGE.read_text()
    command = re.search(r"--page docs/evidence/conformance.md --ranks ([\d,]+)", text)
    assert command
    ranks = [int(count) for count in command[1].split(",")]
    assert {2, 3, 4, 6} <= set(ranks)
    expected = {
        (family, case.operator, case.option): {layout.kind for count in ranks for layout in layouts(case, count)}
        for family, cases in TABLE.items()
        for case in cases
    }
    assert rows(text) == expected, f"run: distconv verify conformance --page {PAGE.relative_to(ROOT)} --ranks 2,3,4,6,8"


# -- bytes --------------------------------------------------------------------------------------------------------


def test_a_redistribution_counts_the_bytes_that_it_sends(comm):
    grid = grid_over(comm, n=comm.size)
    x = dc.scatter(normal(7, 3), grid).requires_grad_(True)
    with counted() as traffic:
        y = x.gather()
    sent = x.local.numel() * 8 * (comm.size - 1)
    assert traffic.sent.total() == traffic.sent["redistribution"] == sent
    with counted() as back:
        y.backward(torch.ones(7, 3, dtype=torch.float64))
    assert back.sent.total() == 0
    assert traffic.sent.total() == sent


@pytest.mark.ranks(at_least=2)
def test_an_allreduce_counts_its_buffer_and_its_ranks(comm):
    with counted() as outer:
        with counted() as inner:
            allreduce(comm, torch.ones(5, dtype=torch.float64), "a sum")
        allreduce(comm, torch.ones(5, dtype=torch.bfloat16), "another sum")
    assert inner.reduced == {("a sum", comm.size): 40}
    assert outer.reduced == {("a sum", comm.size): 40, ("another sum", comm.size): 20}
    assert not outer.sent


@pytest.mark.ranks(at_least=2)
def test_a_training_step_counts_what_it_sums_over_the_ranks(comm):
    grid = grid_over(comm, n=comm.size)
    model = dc.parallelize(torch.nn.Linear(3, 2, dtype=torch.float64), grid, broadcast=True)
    x = dc.scatter(normal(9, 3), grid)
    with counted() as traffic:
        model(x).sum().backward()
    assert traffic.reduced["gradient sum of 2 parameters", comm.size] == (3 * 2 + 2) * 8 + riders_bytes(comm.size)
    assert sum(traffic.reduced.values()) == 8 * 8 + riders_bytes(comm.size) + 8
