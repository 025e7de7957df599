"""Rows of the page of predicted tables, by the costs that they are made of."""

from __future__ import annotations

import pytest

from distconv.jobs.papers.dryden import page
from distconv.jobs.papers.dryden.predictions import seconds
from distconv.jobs.papers.dryden.published import TABLES
from distconv.perfmodel.machine.machine import Machine


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_row_says_where_the_time_of_a_cell_goes(table):
    machine = Machine.load("lassen")
    cell = max((cell for cell in table.cells if cell.samples == min(table.times_s)), key=lambda cell: cell.group)
    computed, halos, reduced, hidden, total, published = map(float, page._spent(machine, cell))
    assert total == pytest.approx(1e3 * seconds(machine, cell), abs=0.051)
    assert published == pytest.approx(1e3 * cell.time_s, abs=0.051)
    assert computed > 0 and min(halos, reduced, hidden) >= 0
    assert total <= computed + halos + reduced + 0.3  # redistributions are part of neither
