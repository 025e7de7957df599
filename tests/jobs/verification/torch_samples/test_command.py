"""The command: its lines and totals, and what it does past a sample that hangs."""

from __future__ import annotations

import json

import pytest

from distconv import cli
from distconv.errors import DataError
from distconv.jobs.verification.conformance.runner import Line, Verdict
from distconv.jobs.verification.torch_samples.command import Journal, chosen, described
from distconv.jobs.verification.torch_samples.database import Sample
from distconv.jobs.verification.torch_samples.runner import FAMILY


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("fallback")
def test_it_tells_and_writes_what_came_of_every_operator(comm, shared_tmp_path, capsys):
    journal, found = shared_tmp_path / "journal", shared_tmp_path / "found.json"
    command = ["verify", "conformance", "--family", FAMILY, "--operator", "exp", "trace", "--samples", "1"]
    command += ["--journal", str(journal), "--json", str(found)]
    assert cli.main(command) == 0
    comm.Barrier()
    told = capsys.readouterr().out
    if comm.rank == 0:
        assert "exact          exp x 6" in told and "replicates     trace x 2 (" in told and "2 operators" in told
        lines = json.loads(found.read_text())
        assert {line["operator"] for line in lines} == {"exp", "trace"}
    assert cli.main(command) == 0  # all of it is in the journal already
    comm.Barrier()
    assert comm.rank or json.loads(found.read_text()) == lines


def test_a_sample_at_which_a_job_ended_hangs_and_is_passed(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert not journal.end_with_a_hang()
    journal.begin(FAMILY, 2, Sample("add", "0", print, (), {}))
    journal.end([])
    journal.begin(FAMILY, 2, Sample("add", "1", print, (), {}))
    again = Journal(tmp_path / "journal")
    assert again.end_with_a_hang()
    assert not Journal(tmp_path / "journal").end_with_a_hang()
    (line,) = Journal(tmp_path / "journal").lines
    assert (line.operator, line.option, line.ranks, line.verdict) == ("add", "1", 2, Verdict.HANGS)


def test_a_line_of_text_for_each_kind_of_result():
    lines = [Line(FAMILY, "add", "0", split, "", 2, Verdict.EXACT) for split in ("first", "last")]
    lines.append(Line(FAMILY, "add", "1", "last", "", 2, Verdict.WRONG, "y0 differs"))
    assert list(described(lines)) == ["exact          add x 2", "WRONG          add x 1: 1, last: y0 differs"]


def test_an_unknown_operator_is_refused():
    with pytest.raises(DataError, match="no samples of 'nothing'; it has those of abs"):
        chosen(["nothing"])
