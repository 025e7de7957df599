"""The paper's strong-scaling tables as the performance model predicts them.

Constants are those of the data sheets, and then some of them fitted to two rows of Table I; all other cells are held
out.

Source: Dryden et al. 2019, VI-B, Tables I, II and III.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from distconv.jobs.papers.dryden.calibration import (
    LASSEN,
    FittedConstant,
    amdahl,
    calibrate,
    fit_amdahl,
    from_data_sheets,
)
from distconv.jobs.papers.dryden.published import TABLES, PublishedTime, calibrates
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import StepModel
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine

Grid = Mapping[str, int]
"""Number of ranks by axis of the process grid."""

Grids = Mapping[int, Grid]
"""Grid of the GPUs of a sample (or a group of samples), by their number."""

SETTINGS = Settings(batch_norm="local")
"""Batch norm over each rank's block, as in LBANN (III-B)."""

GRIDS: Grids = {1: {}, 2: {"h": 2}, 4: {"h": 2, "w": 2}, 8: {"h": 4, "w": 2}, 16: {"h": 8, "w": 2}}
"""Grid of all layers by number of GPUs per sample. The paper does not state its grids.

The 4 GPUs of a node have 2 x 2 blocks, and nodes follow along h. Of the two-dimensional grids, these have the fewest
neighbors on other nodes.
"""

CELLS = tuple(cell for table in TABLES for cell in table.cells)
"""All published times."""


@cache  # the fit predicts each cell many times, with other constants but the same graph
def graph_of(model: str, samples: int, width: int | None = None) -> LayerGraph:
    """Trace a model of the paper for a mini-batch.

    Parameters
    ----------
    model : str
    samples : int
        Samples of the mini-batch.
    width : int, optional
        Channels of a mesh network. None: its own.

    Returns
    -------
    LayerGraph
    """
    (sample,) = {table.sample for table in TABLES if table.model == model}
    with torch.device("meta"):  # its weights are not needed
        module = MODELS[model]() if width is None else MODELS[model](width=width)
    return trace(module, (samples, *sample))


def seconds(machine: Machine, cell: PublishedTime, grids: Grids = GRIDS, width: int | None = None) -> float:
    """Return the predicted time of the training step of one cell.

    Parameters
    ----------
    machine : Machine
    cell : PublishedTime
    grids : Grids
        Grids of each setting.
    width : int, optional
        Channels of a mesh network. None: its own.

    Returns
    -------
    float
    """
    graph = graph_of(cell.model, cell.samples, width)
    axes = {"n": cell.samples // cell.samples_per_group, **grids[cell.group]}
    strategy = resolve(graph, {"*": axes}, cell.ranks)
    return StepModel(graph, machine, cell.ranks, SETTINGS).predict(strategy)[0]


def calibrated(machine: Machine, constants: Sequence[FittedConstant] = LASSEN, grids: Grids = GRIDS) -> Machine:
    """Return the machine with constants fitted to the calibration rows of Table I.

    Parameters
    ----------
    machine : Machine
    constants : sequence of FittedConstant
        Constants to fit.
    grids : Grids
        Grids of each setting.

    Returns
    -------
    Machine
    """
    cells = [cell for cell in CELLS if calibrates(cell)]
    return calibrate(machine, cells, lambda at, cell: seconds(at, cell, grids), constants)


@dataclass(frozen=True)
class Predictions:
    """Predicted seconds of every cell on one machine."""

    machine: Machine
    times: Mapping[PublishedTime, float]

    @classmethod
    def on(cls, machine: Machine, grids: Grids = GRIDS, cells: Iterable[PublishedTime] = CELLS) -> Predictions:
        """Predict cells on a machine.

        Parameters
        ----------
        machine : Machine
        grids : Grids
            Grids of each setting.
        cells : iterable of PublishedTime
            Published times.

        Returns
        -------
        Predictions
        """
        return cls(machine, {cell: seconds(machine, cell, grids) for cell in cells})

    def speedup(self, cell: PublishedTime) -> float:
        """Return the speed-up over the first column of the cell's row."""
        (base,) = (t for c, t in self.times.items() if c.is_base and (c.table, c.samples) == (cell.table, cell.samples))
        return base / self.times[cell]

    def error(self, cell: PublishedTime) -> float:
        """Return the error of the speed-up, relative to the published one."""
        return self.speedup(cell) / cell.speedup - 1


def held_out(table: str | None = None) -> list[PublishedTime]:
    """Return the speed-ups that no constant is fitted to, of one table or of all."""
    return [c for c in CELLS if not c.is_base and not calibrates(c) and table in (None, c.table)]


def mean_error(error: Callable[[PublishedTime], float], cells: Iterable[PublishedTime]) -> float:
    """Return the mean absolute error over cells.

    Parameters
    ----------
    error : callable
        Relative error of a cell.
    cells : iterable of PublishedTime
        Published times.

    Returns
    -------
    float
    """
    errors = [abs(error(cell)) for cell in cells]
    return sum(errors) / len(errors)


def amdahl_error(serial: float) -> Callable[[PublishedTime], float]:
    """Return the error of the speed-up by Amdahl's law with a serial fraction."""
    return lambda cell: amdahl(serial, cell.group, cell.base_group) / cell.speedup - 1


@dataclass(frozen=True)
class PredictedTimes:
    """Predictions with the constants of the data sheets and with fitted ones, and Amdahl's law for comparison."""

    sheets: Predictions
    fitted: Predictions
    amdahl_serial: float
    """Serial fraction fitted to the calibration cells."""
    amdahl_serial_best: float
    """Serial fraction fitted to the held-out cells themselves, which is the best that Amdahl's law can do."""

    @classmethod
    def of(cls, machine: Machine, cells: Sequence[PublishedTime] = CELLS, *, fit: bool = True) -> PredictedTimes:
        """Predict cells on a machine.

        Parameters
        ----------
        machine : Machine
        cells : sequence of PublishedTime
            Published times.
        fit : bool
            True calibrates the machine from its data sheets. Otherwise its constants are kept.

        Returns
        -------
        PredictedTimes
        """
        sheets = from_data_sheets(machine)
        return cls(
            Predictions.on(sheets, cells=cells),
            Predictions.on(calibrated(sheets) if fit else machine, cells=cells),
            fit_amdahl([c for c in CELLS if calibrates(c) and not c.is_base]),
            fit_amdahl(held_out()),
        )
