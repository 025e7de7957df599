"""Figures of mesh samples: the first sample of a new data set, and the result of a training.

The result of a training shows input, label and prediction of held-out samples, the loss, and precision over recall.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.whole_files import write_picture

from .scores import PredictorScore

Map = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MeshExample:
    """Maps (H, W) of one held-out sample."""

    title: str
    channel: Map
    label: Map
    probability: Map


def draw(
    path: str | os.PathLike[str],
    examples: Sequence[MeshExample],
    *,
    channel: str,
    threshold: float,
    losses: Sequence[tuple[int, float]],
    verdicts: Sequence[PredictorScore],
    title: str,
) -> None:
    """Write the figure of a finished training.

    Parameters
    ----------
    path : path-like
        The image file.
    examples : sequence of MeshExample
        Samples to show, one in each row.
    channel : str
        Name of the channel shown.
    threshold : float
        Probability from which on a cell is predicted positive.
    losses : sequence of (int, float)
        Step and loss.
    verdicts : sequence of PredictorScore
        Scores; those with a curve are drawn. The last one, the network's, is drawn on top.
    title : str
        Title of the figure.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(examples)
    figure = Figure(figsize=(12.0, 2.9 * rows + 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows + 1, 4, squeeze=False)
    for row, example in zip(axes, examples, strict=False):
        _draw_example(figure, row, example, channel, threshold)
    grid = axes[-1, 0].get_gridspec()
    for axis in axes[-1]:
        axis.remove()
    judged = [verdict for verdict in verdicts if verdict.curve]
    _draw_losses(figure.add_subplot(grid[-1, : 2 if judged else 4]), losses)
    if judged:
        _draw_curves(figure.add_subplot(grid[-1, 2:]), judged)
    write_picture(path, figure, dpi=110)


def draw_sample(path: str | os.PathLike[str], channel: Map, label: Map, name: str, family: str) -> None:
    """Write a figure of one channel of a sample and its label.

    Parameters
    ----------
    path : path-like
        The image file.
    channel, label : ndarray, shape (H, W)
        The maps.
    name : str
        Name of the channel.
    family : str
        Family of the run.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, 2)
    _draw_maps(figure, row, channel, label, f"{family}: {name}")
    for axis in row:
        axis.set_xticks([])
        axis.set_yticks([])
    write_picture(path, figure, dpi=110)


def _draw_maps(figure: Any, row: Any, channel: Map, label: Map, title: str) -> None:
    """Draw a channel and the label on the first two axes of a row. Row 0 of the maps is at the bottom."""
    # A few extreme cells would take all colors.
    low, high = np.percentile(channel, (1, 99))
    shown = row[0].imshow(channel, origin="lower", cmap="viridis", vmin=low, vmax=high)
    figure.colorbar(shown, ax=row[0], shrink=0.8)
    row[0].set_title(title, fontsize=9)
    row[1].imshow(label, origin="lower", cmap="gray_r", vmin=0, vmax=1)
    row[1].set_title(f"label: {100 * label.mean():.1f} % of the cells", fontsize=9)


def _draw_example(figure: Any, row: Any, example: MeshExample, channel: str, threshold: float) -> None:
    _draw_maps(figure, row, example.channel, example.label, f"{example.title}: {channel}")
    shown = row[2].imshow(example.probability, origin="lower", cmap="magma_r", vmin=0, vmax=1)
    figure.colorbar(shown, ax=row[2], shrink=0.8)
    row[2].set_title("predicted probability", fontsize=9)
    row[3].imshow(_outcome(example, threshold), origin="lower")
    row[3].set_title("green: found, red: missed, orange: false", fontsize=8)
    for axis in row:
        axis.set_xticks([])
        axis.set_yticks([])


def _outcome(example: MeshExample, threshold: float) -> Map:
    called, label = example.probability >= threshold, example.label > 0.5
    colours = np.ones((*label.shape, 3))
    colours[called & label] = (0.1, 0.6, 0.2)
    colours[~called & label] = (0.85, 0.1, 0.1)
    colours[called & ~label] = (1.0, 0.65, 0.1)
    return colours


def _draw_losses(axis: Any, losses: Sequence[tuple[int, float]]) -> None:
    steps, values = [step for step, _ in losses], [value for _, value in losses]
    axis.plot(steps, values, color="0.75", linewidth=0.8, label="each step")
    window = max(1, len(values) // 20)
    if len(values) > window:
        mean = np.convolve(values, np.ones(window) / window, mode="valid")
        middle = window // 2
        axis.plot(steps[middle : middle + len(mean)], mean, color="tab:blue", label=f"mean of {window} steps")
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    axis.legend(fontsize=8)


def _draw_curves(axis: Any, verdicts: Sequence[PredictorScore]) -> None:
    for verdict in reversed(verdicts):
        recall, precision = zip(*verdict.curve, strict=True)
        network = verdict is verdicts[-1]
        axis.plot(
            recall, precision, linewidth=2.0 if network else 1.2, label=f"{verdict.name}: F1 {verdict.heldout:.3f}"
        )
    axis.set(xlabel="recall of held-out cells", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axis.grid(color="0.9")
    axis.legend(fontsize=8, loc="lower left")
