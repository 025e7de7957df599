"""The picture at the end of a training: curves of loss and accuracy, sequences with label and prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.curves import draw_accuracies, draw_losses

COLUMNS = 4
BITS_IN_A_ROW = 25


@dataclass(frozen=True, eq=False)
class Example:
    """The values of a sequence (T, C), its class, and the class predicted."""

    values: NDArray[np.float32]
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
    figure = Figure(figsize=(12.0, 4.0 + 1.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, COLUMNS, height_ratios=[2] + [1] * rows)
    draw_losses(figure.add_subplot(grid[0, : COLUMNS // 2]), lines)
    draw_accuracies(figure.add_subplot(grid[0, COLUMNS // 2 :]), lines)
    for index, example in enumerate(examples):
        _draw_example(figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS]), example)
    figure.savefig(path, dpi=110)


def _draw_example(axis: Any, example: Example) -> None:
    values = example.values
    if values.shape[1] == 1:
        whole = max(1, len(values) // BITS_IN_A_ROW) * BITS_IN_A_ROW
        bits = np.resize(values[:, 0], whole) if len(values) < whole else values[:whole, 0]
        axis.imshow(bits.reshape(-1, BITS_IN_A_ROW), cmap="gray_r", vmin=0, vmax=1, aspect="auto")
        axis.set(xticks=[], yticks=[])
    else:
        axis.imshow(values.T, aspect="auto", origin="lower", cmap="magma")
        axis.set(xlabel="frame", ylabel="coefficient")
    right = example.label == example.predicted
    text = example.label if right else f"{example.predicted}, not {example.label}"
    axis.set_title(text, fontsize=9, color="tab:green" if right else "tab:red")
