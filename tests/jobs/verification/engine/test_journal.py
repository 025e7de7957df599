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
    text = "the job hung or ended here"
    assert line == Line("torch-samples", "add", "1", "", "", 2, Verdict.HANGS, text)


def test_a_line_of_text_for_each_kind_of_result():
    lines = [Line("torch-samples", "add", "0", split, "", 2, Verdict.EXACT) for split in ("first", "last")]
    lines.append(Line("torch-samples", "add", "1", "last", "", 2, Verdict.WRONG, "y0 differs"))
    assert describe_lines(lines) == ["exact          add x 3: 2", "WRONG          add x 3: 1, last: y0 differs"]
    assert describe_lines(lines[:2]) == ["exact          add 0: all 2 layouts"]
    moved = [replace(line, verdict=Verdict.REDISTRIBUTES, moved_bytes=1200) for line in lines[:1]]
    assert describe_lines([*moved, lines[1]]) == ["exact          add 0: last", "redistributes  add 0: first (1.2 kB)"]
    assert describe_lines([replace(lines[0], option="", halo_bytes=7, moved_bytes=9)] * 2) == [
        "exact          add: all 2 layouts (halo up to 7 B)"
    ]
    several = [replace(line, option=f"{number}") for number, line in enumerate(moved * 2)]
    assert describe_lines(several) == ["redistributes  add x 2: 2 (1.2 kB)"]
    wrong = [
        replace(lines[2], layout=name, grid=f"{name}=2", text=text) for name, text in (("n", "y\na"), ("h", "z\nb"))
    ]
    assert describe_lines(wrong) == ["WRONG          add 1: n (n=2): y\na; h (h=2): z\nb"]
    assert describe_lines([replace(line, text=f"y\n{line.grid}") for line in wrong]) == [
        "WRONG          add 1: n, h: y\nn=2"
    ]
    raises = [replace(line, verdict=Verdict.RAISES) for line in wrong]
    assert describe_lines(raises) == ["raises         add 1: n, h: y\na"]


def test_json_keeps_every_line(tmp_path):
    lines = [
        Line("calls", "add", "0", "height", "h=2", 2, Verdict.RAISES, "no rule; gather it first", 700, 5, 3),
        Line("calls", "sub", "0", "width", "w=2", 2, Verdict.EXACT, moved_bytes=500),
    ]
    write_json(tmp_path / "found.json", lines)
    assert read_json(tmp_path / "found.json") == lines
    assert (tmp_path / "found.json").read_text().splitlines()[2] == '"family": "calls",'
    assert totals([*lines, lines[0]]) == (
        "2 operators, 3 cases: 1 exact, 0 redistributes, 0 replicates, 2 raises, 0 refused as torch does, "
        "0 refused in other words, 0 differs at infinities, 0 WRONG, 0 UNCLEAR, 0 HANGS (1.9 kB redistributed)"
    )
