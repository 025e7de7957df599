"""Fitting constants of a machine, and Amdahl's law, to measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.jobs.papers.dryden.calibration import (
    LASSEN,
    amdahl,
    calibrate,
    constants_of,
    fit_amdahl,
    from_data_sheets,
    with_constants,
)
from distconv.jobs.papers.dryden.published import TABLE_I, PublishedTime, calibrates
from distconv.perfmodel.machine.machine import Machine

CHOSEN = {"flops": 12e12, "collective step": 50e-6}


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("lassen")


def step(machine: Machine, cell: PublishedTime) -> float:
    """A step of 4 TFLOP per sample and a hundred messages for each doubling of its GPUs."""
    values = constants_of(machine)
    return 4e12 / cell.group / values["flops"] + 100 * cell.group.bit_length() * values["collective step"]


def rows(time) -> list[PublishedTime]:
    """The calibration rows with other times."""
    cells = [cell for cell in TABLE_I.cells if calibrates(cell)]
    base = next(cell for cell in cells if cell.is_base)
    return [replace(cell, time_s=time(cell), base_s=time(base)) for cell in cells]


def test_fitted_constants_are_those_that_made_the_times(machine: Machine):
    chosen = with_constants(machine, CHOSEN)
    constants = [constant for constant in LASSEN if constant.name in CHOSEN]
    found = constants_of(calibrate(from_data_sheets(machine), rows(lambda c: step(chosen, c)), step, constants))
    assert {name: found[name] for name in CHOSEN} == pytest.approx(CHOSEN, rel=0.01)


def test_fitted_constants_stay_within_their_bounds(machine: Machine):
    slow = with_constants(machine, {"flops": 1e12, "collective step": 50e-6})
    found = constants_of(calibrate(machine, rows(lambda c: step(slow, c)), step))
    assert all(0.999 * c.low <= found[c.name] <= 1.001 * c.high for c in LASSEN)
    assert found["flops"] == pytest.approx(7.85e12, rel=0.01)


def test_a_machine_with_its_own_constants_is_the_same_machine(machine: Machine):
    assert with_constants(machine, constants_of(machine)) == machine


def test_data_sheet_values_lie_within_their_bounds():
    assert all(constant.low <= constant.sheet <= constant.high for constant in LASSEN)


def test_amdahls_law_is_fitted_to_the_speedups_that_it_makes():
    cells = rows(lambda cell: 1 / amdahl(0.07, cell.group))
    assert fit_amdahl(cells) == pytest.approx(0.07, abs=1e-4)
