"""The picture at the end of a training: curves of loss and accuracy, clouds with label and prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.curves import draw_accuracies, draw_losses

COLUMNS = 4


@dataclass(frozen=True, eq=False)
class Example:
    """The points of a cloud (P, 3), its class, and the class predicted."""

    points: NDArray[np.float32]
    label: str
    predicted: str


def draw(
    path: str | os.PathLike[str], examples: Sequence[Example], lines: Sequence[dict[str, Any]], title: str
) -> None:
    """Write the picture; ``lines`` are those of metrics.jsonl.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(examples) // COLUMNS)
    figure = Figure(figsize=(12.0, 4.0 + 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, COLUMNS, height_ratios=[1.3] + [1] * rows)
    draw_losses(figure.add_subplot(grid[0, : COLUMNS // 2]), lines)
    draw_accuracies(figure.add_subplot(grid[0, COLUMNS // 2 :]), lines)
    for index, example in enumerate(examples):
        place = grid[1 + index // COLUMNS, index % COLUMNS]
        _draw_example(figure.add_subplot(place, projection="3d"), example)
    figure.savefig(path, dpi=110)


def _draw_example(axis: Any, example: Example) -> None:
    x, y, z = example.points.T
    axis.scatter(x, y, z, c=z, s=1.0, linewidths=0)
    right = example.label == example.predicted
    text = example.label if right else f"{example.predicted}, not {example.label}"
    axis.set_title(text, fontsize=9, color="tab:green" if right else "tab:red")
    axis.set_aspect("equal")
    axis.set_axis_off()
