"""What the paper measured on Lassen, and what the model predicts for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv import cli
from distconv.errors import PlanError
from distconv.jobs.papers.dryden.calibration import LASSEN, constants_of, fit_amdahl, from_data_sheets
from distconv.jobs.papers.dryden.page import error_row
from distconv.jobs.papers.dryden.predictions import (
    CELLS,
    Predictions,
    amdahl_error,
    calibrated,
    graph_of,
    held_out,
    mean_error,
)
from distconv.jobs.papers.dryden.published import TABLES, calibrates
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.selection import select

PAGE = Path(__file__).parents[4] / "docs" / "evidence" / "paper-tables.md"
KEEP_ALL = {"memory_model": "keep-all", "workspace": 2**30}


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("lassen")


def test_only_two_rows_of_table_i_are_fitted_to():
    assert {(cell.table, cell.samples) for cell in CELLS if calibrates(cell)} == {("I", 4), ("I", 128)}
    assert [len(held_out(table.name)) for table in TABLES] == [22, 24, 17]
    assert not any(calibrates(cell) or cell.is_base for cell in held_out())


@pytest.mark.long
def test_calibration_gives_the_constants_of_the_file(machine: Machine):
    found = constants_of(calibrated(from_data_sheets(machine)))
    named = {constant.name for constant in LASSEN}
    assert {name: found[name] for name in named} == pytest.approx(
        {name: value for name, value in constants_of(machine).items() if name in named}, rel=0.03
    )


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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_the_page_can_be_made(tmp_path: Path):
    assert cli.main(["reproduce", "dryden", "--out", str(tmp_path / "page.md")]) == 0
    made = (tmp_path / "page-cells.md").read_text()
    assert all(f"## Table {table.name}" in made for table in TABLES)


# -- what fits a GPU of 16 GB, with every output and error signal kept and 1 GiB of workspace -------------------------


def memories(graph: LayerGraph, machine: Machine, ranks: int) -> list[float]:
    """Bytes with each candidate of the first layer, which the others follow as far as they can."""
    found = candidates(graph, ranks)
    plans = [
        {name: first if first in options else options[0] for name, options in found.items()}
        for first in found[graph.deciding[0]]
    ]
    return [evaluate(graph, plan, machine, ranks, **KEEP_ALL).memory for plan in plans]


def test_a_gpu_of_16_gb_has_room_for_one_sample_of_mesh1k_and_two_for_one_of_mesh2k(machine: Machine):
    room, mesh2k = machine.memory_bytes, graph_of("mesh2k", 1)
    assert room == 16e9
    assert max(memories(graph_of("mesh1k", 1), machine, 1)) <= room < min(memories(graph_of("mesh1k", 2), machine, 1))
    assert min(memories(mesh2k, machine, 2)) <= room < min(memories(mesh2k, machine, 1))
    with pytest.raises(PlanError):
        select(mesh2k, machine, 1, memory=room, **KEEP_ALL)
    assert select(mesh2k, machine, 2, memory=room, **KEEP_ALL).memory <= room
