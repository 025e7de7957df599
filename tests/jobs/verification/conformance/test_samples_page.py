"""The page of torch's samples: shares, the table beside DTensor's, and each message once."""

from __future__ import annotations

from distconv.jobs.verification.conformance.samples_page import DTENSOR, FAMILY, page
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.verdicts import Verdict


def line(family, operator, option, verdict, text="", layout="last", ranks=2):
    return Line(family, operator, option, layout, "w=2", ranks, verdict, text)


LINES = [
    line(FAMILY, "add", "0", Verdict.EXACT),
    line(FAMILY, "add", "0", Verdict.EXACT, layout="first"),
    line(FAMILY, "sort", "0", Verdict.REPLICATES),
    line(FAMILY, "resize_", "0", Verdict.RAISES, "of 3 elements: use another"),
    line(FAMILY, "resize_", "1", Verdict.RAISES, "of 4 elements: use another"),
    line(FAMILY, "add", "0", Verdict.REDISTRIBUTES, ranks=3),
    line(DTENSOR, "add", "0", Verdict.EXACT),
    line(DTENSOR, "sort", "0", Verdict.WRONG),
    line(DTENSOR, "resize_", "0", Verdict.HANGS, layout=""),
    line(DTENSOR, "unknown", "0", Verdict.EXACT),
]


def test_shares_of_every_rank_count():
    text = page(LINES)
    assert "| 2 | 5 | 2 | 1 | 2 | 0 | 0 | 0 | 60.00% |" in text
    assert "| 3 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 100.00% |" in text


def test_beside_dtensor_stands_what_both_have_run():
    text = page(LINES, 4)
    assert "| 2 | distconv | 3 | 1 | 1 | 1 | 0 | 0 | 0 | 66.67% |" in text
    assert "| 2 | DTensor | 3 | 1 | 0 | 0 | 0 | 1 | 1 | 33.33% |" in text
    assert "DTensor is wrong or hangs with: `resize_` (1), `sort` (1)." in text
    assert "the first 4 of each" in text and "--samples 4 -->" in text


def test_a_message_is_told_once_without_its_numbers():
    assert "- 2 x raises, `resize_`: of N elements: use another" in page(LINES)
    assert "Beside" not in page([each for each in LINES if each.family == FAMILY])
