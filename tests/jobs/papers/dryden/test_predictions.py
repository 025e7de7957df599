"""Predictions for the measurements of the paper on Lassen, and the constants that are fitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv.jobs.papers.dryden.calibration import fit_amdahl
from distconv.jobs.papers.dryden.page import error_row
from distconv.jobs.papers.dryden.predictions import (
    CELLS,
    Predictions,
    amdahl_error,
    held_out,
    mean_error,
)
from distconv.jobs.papers.dryden.published import TABLES, calibrates
from distconv.perfmodel.machine.machine import Machine

PAGE = Path(__file__).parents[4] / "docs" / "evidence" / "paper-tables.md"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("lassen")


def test_only_two_rows_of_table_i_are_fitted_to():
    assert {(cell.table, cell.samples) for cell in CELLS if calibrates(cell)} == {("I", 4), ("I", 128)}
    assert [len(held_out(table.name)) for table in TABLES] == [22, 24, 17]
    assert not any(calibrates(cell) or cell.is_base for cell in held_out())


@pytest.mark.long
def test_heldout_speedups_are_predicted_far_better_than_by_amdahls_law_with_the_errors_of_the_page(machine: Machine):
    predictions = Predictions.on(machine)
    error = mean_error(predictions.error, held_out())
    assert error <= 0.20
    assert all(mean_error(predictions.error, held_out(table.name)) <= 0.25 for table in TABLES)
    to_same_cells = fit_amdahl([cell for cell in CELLS if calibrates(cell) and not cell.is_base])
    for serial in (to_same_cells, fit_amdahl(held_out())):
        assert error <= 0.7 * mean_error(amdahl_error(serial), held_out())
    assert error_row("**calibrated**", predictions.error) in PAGE.read_text(), "make docs/evidence/paper-tables.md anew"


# -- what fits a GPU of 16 GB, with every output and error signal kept and 1 GiB of workspace -------------------------
