"""The picture at the end of a classifier's training: curves of loss and accuracy, and images with predicted classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.curves import draw_accuracies, draw_losses

COLUMNS = 8


@dataclass(frozen=True, eq=False)
class Example:
    """One image (C, H, W), its class, and the class predicted."""

    image: NDArray[Any]
    label: int
    predicted: int


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
    figure = Figure(figsize=(12.0, 4.0 + 1.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, COLUMNS, height_ratios=[2.5] + [1] * rows)
    draw_losses(figure.add_subplot(grid[0, : COLUMNS // 2]), lines)
    draw_accuracies(figure.add_subplot(grid[0, COLUMNS // 2 :]), lines)
    for index, example in enumerate(examples):
        _draw_example(figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS]), example)
    figure.savefig(path, dpi=110)


def _draw_example(axis: Any, example: Example) -> None:
    image = np.moveaxis(example.image.astype(np.float64), 0, -1)
    low, high = image.min(), image.max()
    image = (image - low) / (high - low if high > low else 1.0)
    # Red, green and blue if there are three channels, else the first alone.
    axis.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray")
    right = example.label == example.predicted
    text = f"{example.predicted}" if right else f"{example.predicted}, not {example.label}"
    axis.set_title(text, fontsize=9, color="tab:green" if right else "tab:red")
    axis.set_xticks([])
    axis.set_yticks([])
