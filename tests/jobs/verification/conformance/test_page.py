"""The data file of the conformance page: the worst verdict of each row on each kind of grid."""

from __future__ import annotations

from distconv.jobs.verification.conformance import page
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.verdicts import Verdict


def line(layout: str, ranks: int, verdict: Verdict, moved: int = 0) -> Line:
    return Line("windows", "pool", "K2", layout, "a grid", ranks, verdict, "", moved, 0, 0)


def test_a_cell_has_the_worst_verdict_its_bytes_and_the_rank_counts_that_have_it() -> None:
    lines = [
        line("samples", 2, Verdict.EXACT),
        line("samples", 4, Verdict.EXACT),
        line("height", 2, Verdict.REDISTRIBUTES, 1500),
        line("height", 4, Verdict.REDISTRIBUTES, 2500),
        line("width", 2, Verdict.EXACT),
        line("width", 4, Verdict.REPLICATES, 800),
        line("channels", 2, Verdict.RAISES),
        line("channels", 4, Verdict.WRONG),
    ]
    (row,) = page.data_rows(lines)
    filled = {name: cell for name, cell in row.items() if cell}
    assert filled == {
        "family": "windows",
        "operator": "pool",
        "option": "K2",
        "n": "=",
        "h": "~ 2.5 kB",
        "w": "r 800 B (4)",
        "c": "WRONG (4)",
    }
    heads, cells = page.data(lines).splitlines()
    assert heads.split(",") == list(row) and cells.split(",") == list(row.values())
