"""Rows of the page of predicted tables, by the costs that they are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.papers.dryden import page
from distconv.jobs.papers.dryden.predictions import seconds
from distconv.jobs.papers.dryden.published import TABLES
from distconv.perfmodel.machine.machine import Machine


def test_rows_of_the_table_of_exponents_have_a_cell_for_each_heading(monkeypatch):
    monkeypatch.setattr(page, "calibrated", lambda machine: machine)  # takes seconds, and only changes numbers
    monkeypatch.setattr(page.Predictions, "on", lambda machine: SimpleNamespace(error=lambda cell: 0.25))
    known: Any = SimpleNamespace(machine=Machine.load("lassen"))
    results: Any = SimpleNamespace(sheets=known, fitted=known)
    rows = [line for line in page._exponents(results) if line.startswith("|")]
    assert len(rows) == 3 + len(page.POWERS)
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    single = [name for row, _ in page.SINGLE for name in [row.name] if row.ratio is not None]
    assert single and all(name in rows[0] for name in single)


def test_errors_of_speed_ups_do_not_depend_on_a_common_factor_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "seconds", lambda machine, cell, width: width / 96 * cell.time_s)
    rows = [line.split("|")[1:-1] for line in page._widths(Machine.load("lassen")) if line.startswith("| ")][1:]
    widths, speedups, times, ratios = zip(*([value.strip() for value in row] for row in rows), strict=True)
    assert widths == ("96", "128", "160") and ratios == ("1.00", "1.33", "1.67")
    assert times == ("0.0%", "33.3%", "66.7%")
    assert all(float(error.rstrip("%")) < 1 for error in speedups)  # published speed-ups are rounded


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_row_says_where_the_time_of_a_cell_goes(table):
    machine = Machine.load("lassen")
    cell = max((cell for cell in table.cells if cell.samples == min(table.times_s)), key=lambda cell: cell.group)
    computed, halos, reduced, hidden, total, published = map(float, page._spent(machine, cell))
    assert total == pytest.approx(1e3 * seconds(machine, cell), abs=0.051)
    assert published == pytest.approx(1e3 * cell.time_s, abs=0.051)
    assert computed > 0 and min(halos, reduced, hidden) >= 0
    assert total <= computed + halos + reduced + 0.3  # redistributions are part of neither
