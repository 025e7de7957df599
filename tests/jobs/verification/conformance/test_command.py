"""``distconv verify conformance``: its table, its lines and totals, its page, and bad input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from distconv import cli
from distconv.jobs.verification.conformance import page, samples
from distconv.jobs.verification.conformance.command import OPERATORS
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.engine import launch
from distconv.jobs.verification.engine.journal import Journal, Key, Line, read_json
from distconv.jobs.verification.engine.layouts import KINDS, layouts
from distconv.jobs.verification.engine.verdicts import Verdict
from tests.jobs.command_lines import assert_refused, commands_in, option_tests

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "evidence" / "conformance.md"


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


# -- the command and the page -------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_command_prints_lines_and_totals_and_writes_them(comm, shared_tmp_path, capsys):
    found, written = shared_tmp_path / "found.json", shared_tmp_path / "page.md"
    arguments = ["--operator", "relu6", "lp_pool2d", "--json", str(found), "--page", str(written)]
    assert cli.main(["verify", "conformance", *arguments]) == 0
    out = capsys.readouterr().out
    if comm.rank:
        assert out == ""
        return
    assert "exact          nn.functional.relu6 sample " in out and "exact          lp_pool2d p=2 K2: " in out
    lines = read_json(found)
    assert f"2 ranks: 2 operators, {len(lines)} cases: " in out
    assert json.loads(found.read_text())[0]["verdict"] == "exact"
    pooled = {line.layout for line in lines if line.family == "windows"}
    assert rows(written.with_suffix(".csv"))["windows", "lp_pool2d", "p=2 K2"] == pooled
    assert f"| 2 | 2 | {len(lines)} | " in written.read_text()


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("fallback")
def test_torchs_samples_are_told_by_operator_and_come_from_the_journal_again(comm, shared_tmp_path, capsys):
    journal, found = shared_tmp_path / "journal", shared_tmp_path / "found.json"
    command = ["verify", "conformance", "--family", "torch-samples", "--operator", "exp", "trace", "--samples", "1"]
    command += ["--journal", str(journal), "--json", str(found)]
    assert cli.main(command) == 0
    comm.Barrier()
    told = capsys.readouterr().out
    if comm.rank == 0:
        assert "exact          exp x 6: 6" in told and "replicates     trace 0: first (" in told
        lines = json.loads(found.read_text())
        assert {line["operator"] for line in lines} == {"exp", "trace"}
    assert cli.main(command) == 0
    comm.Barrier()
    assert comm.rank or json.loads(found.read_text()) == lines


def test_a_job_is_started_for_each_rank_count_and_one_page_written(tmp_path, monkeypatch):
    """Jobs that start indeed: tests/jobs/verification/engine/test_launch.py."""
    monkeypatch.chdir(ROOT)
    started, written = [], tmp_path / "page.md"

    def start(launcher, ranks, arguments):
        *words, _, path = arguments
        started.append((ranks, words))
        journal = Journal(Path(path))
        journal.begin(Key("windows", ranks, "lp_pool1d", "p=2"))
        journal.end([Line("windows", "lp_pool1d", "p=2", "height", f"h={ranks}", ranks, Verdict.EXACT)])
        return 0

    monkeypatch.setattr(launch, "start", start)
    asked = ["--operator", "lp_pool1d", "--ranks", "1,2"]
    assert cli.main(["verify", "conformance", *asked, "--page", str(written)]) == 0
    assert [ranks for ranks, _ in started] == [1, 2] * (len(started) // 2)
    for _, words in started:
        assert words[:3] == ["verify", "conformance", "--family"] and "lp_pool1d" in words and "--ranks" not in words
    text = written.read_text()
    assert "--page docs/evidence/conformance.md --ranks 1,2 -->" in text
    assert "| 1 | 1 | 1 | " in text and "| 2 | 1 | 1 | " in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "fly"], "--operator fly: no such operator. Use one of "),
        (["--json", "/nowhere/found.json"], "--json /nowhere/found.json: no such folder (/nowhere)"),
        (["--family", "torch-samples", "calls"], "torch-samples and dtensor cannot run with other families"),
        (["--family", "torch-samples", "dtensor"], "dtensor needs a job of its own. Start the jobs with --ranks."),
        (["--family", "torch-samples", "--operator", "fly"], "--operator fly: no such operator. Use one of "),
        (["--ranks", "2"], "--ranks starts jobs by itself; call it without mpiexec"),
    ],
)
@pytest.mark.parametrize("name", [["conformance"], ["verify", "conformance"]])
def test_bad_input_is_one_line(comm, capsys, name, arguments, message):
    assert_refused(capsys, [*name, *arguments], message)


def rows(path, families=TABLE):
    """Kinds of layouts with a result in each row of a data file, by family, operator and option."""
    kinds = {heading: kind for kind, (heading, _) in page.SHORT.items()}
    with path.open(newline="") as file:
        return {
            (row["family"], row["operator"], row["option"]): {kind for head, kind in kinds.items() if row[head]}
            for row in csv.DictReader(file)
            if row["family"] in families
        }


def test_the_page_has_the_rows_and_cells_of_the_table():
    text = PAGE.read_text()
    command = re.search(r"--page docs/evidence/conformance.md --ranks ([\d,]+)", text)
    assert command
    ranks = [int(count) for count in command[1].split(",")]
    assert {2, 3, 4} <= set(ranks)
    expected = {
        (family, case.operator, case.option): {layout.kind for count in ranks for layout in layouts(case, count)}
        for family, cases in TABLE.items()
        for case in cases
    }
    data = PAGE.with_suffix(".csv")
    assert rows(data) == expected, f"run: distconv verify conformance --page {PAGE.relative_to(ROOT)} --ranks 2,3,4,6"
    torchs = {operator for _, operator, _ in rows(data, [OPERATORS])}
    assert torchs < set(samples.names()) and len(torchs) > 700


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
