"""The picture at the end of a classifier's training: curves of loss and accuracy, and examples as a job draws them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distconv.whole_files import write_picture

from .curves import draw_accuracies, draw_losses


@dataclass(frozen=True)
class Layout:
    """Rows of ``columns`` examples, each row so many inches high below curves ``curves`` times as high; 3-D or not."""

    columns: int
    row_inches: float
    curves: float
    projection: str | None = None


def draw_training(
    path: str | os.PathLike[str],
    lines: Sequence[dict[str, Any]],
    title: str,
    layout: Layout,
    drawers: Sequence[Callable[[Any], None]],
) -> None:
    """Write the picture; ``lines`` are those of metrics.jsonl, ``drawers`` draw an example each on axes.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = layout.columns, -(-len(drawers) // layout.columns)
    figure = Figure(figsize=(12.0, 4.0 + layout.row_inches * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[layout.curves] + [1] * rows)
    draw_losses(figure.add_subplot(grid[0, : columns // 2]), lines)
    draw_accuracies(figure.add_subplot(grid[0, columns // 2 :]), lines)
    for index, draw in enumerate(drawers):
        draw(figure.add_subplot(grid[1 + index // columns, index % columns], projection=layout.projection))
    write_picture(path, figure, dpi=110)


def name_example(axis: Any, label: object, predicted: object) -> None:
    """Write the class predicted above an example, and in red the right one if it is another."""
    right = label == predicted
    text = f"{predicted}" if right else f"{predicted}, not {label}"
    axis.set_title(text, fontsize=9, color="tab:green" if right else "tab:red")
