"""Lines as text and JSON, and the journal that goes on behind a case at which a job ended."""

from __future__ import annotations

from dataclasses import replace

from distconv.jobs.verification.engine.journal import Journal, Key, Line, describe_lines, read_json, totals, write_json
from distconv.jobs.verification.engine.verdicts import Verdict


def test_a_case_at_which_a_job_ended_hangs_and_is_passed(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert not journal.end_with_a_hang()
    journal.begin(Key("torch-samples", 2, "add", "0"))
    journal.end([])
    journal.begin(Key("torch-samples", 2, "add", "1"))
    again = Journal(tmp_path / "journal")
    assert again.end_with_a_hang()
    assert not Journal(tmp_path / "journal").end_with_a_hang()
    (line,) = Journal(tmp_path / "journal").lines
    assert (line.operator, line.option, line.ranks, line.verdict) == ("add", "1", 2, Verdict.HANGS)


def test_a_line_of_text_for_each_kind_of_result():
    lines = [Line("torch-samples", "add", "0", split, "", 2, Verdict.EXACT) for split in ("first", "last")]
    lines.append(Line("torch-samples", "add", "1", "last", "", 2, Verdict.WRONG, "y0 differs"))
    assert describe_lines(lines) == ["exact          add x 3: 2", "WRONG          add x 3: 1, last: y0 differs"]
    assert describe_lines(lines[:2]) == ["exact          add 0: all 2 layouts"]
    moved = [replace(line, verdict=Verdict.REDISTRIBUTES, moved_bytes=1200) for line in lines[:1]]
    assert describe_lines([*moved, lines[1]]) == ["exact          add 0: last", "redistributes  add 0: first (1.2 kB)"]


def test_json_keeps_every_line(tmp_path):
    lines = [Line("calls", "add", "0", "height", "h=2", 2, Verdict.RAISES, "no rule; gather it first")]
    write_json(tmp_path / "found.json", lines)
    assert read_json(tmp_path / "found.json") == lines
    assert totals(lines).startswith("1 operators, 1 cases: 0 exact") and " 1 raises, " in totals(lines)
