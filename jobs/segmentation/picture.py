"""Figure at the end of training: losses, scores, and samples with labels and predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import draw_losses
from distconv.whole_files import write_picture

Map = NDArray[Any]


@dataclass(frozen=True, eq=False)
class SegmentationExample:
    """Maps (H, W) of one sample: first channel, labels, and predicted classes. Of a volume, the middle slice."""

    title: str
    image: Map
    label: Map
    predicted: Map


def draw(
    path: str | os.PathLike[str],
    examples: Sequence[SegmentationExample],
    lines: Sequence[dict[str, Any]],
    *,
    classes: int,
    ignore: int | None,
    title: str,
) -> None:
    """Write the figure of a finished training.

    Parameters
    ----------
    path : path-like
        The image file.
    examples : sequence of SegmentationExample
        Samples to show, one in each row.
    lines : sequence of dict
        The records of ``metrics.jsonl``.
    classes : int
        Number of classes.
    ignore : int, optional
        Label value whose pixels are left white.
    title : str
        Title of the figure.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.4 + 3.0 * len(examples)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(len(examples) + 1, 6)
    draw_losses(figure.add_subplot(grid[0, :3]), lines)
    _draw_scores(figure.add_subplot(grid[0, 3:]), lines)
    for row, example in enumerate(examples, 1):
        image, label, predicted = (figure.add_subplot(grid[row, 2 * i : 2 * i + 2]) for i in range(3))
        image.imshow(example.image, cmap="gray")
        there = example.label if ignore is None else np.where(example.label == ignore, np.nan, example.label)
        for axis, values in ((label, there), (predicted, example.predicted)):
            axis.imshow(values, cmap="viridis", vmin=0, vmax=max(1, classes - 1), interpolation="nearest")
        for axis, text in ((image, example.title), (label, "label"), (predicted, "predicted class")):
            axis.set_title(text, fontsize=9)
            axis.set_axis_off()
    write_picture(path, figure, dpi=110)


def _draw_scores(axis: Any, lines: Sequence[dict[str, Any]]) -> None:
    evaluations = [line for line in lines if "mean_dice" in line and line["mean_dice"] is not None]
    for name in ("mean_dice", "mean_iou"):
        axis.plot(
            [line["step"] for line in evaluations],
            [line[name] for line in evaluations],
            "o-",
            label=name.replace("_", " "),
        )
    axis.set(xlabel="step", ylabel="mean over the classes", ylim=(0, 1.02))
    axis.legend(fontsize=8)
