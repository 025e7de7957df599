"""Figures of plans: splits and times of layers, memory, and predicted step times over numbers of ranks.

Called by ``distconv plan --plot`` and the benchmarks. matplotlib is imported on first use, as it is optional.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distconv.arrangement import AXES
from distconv.errors import DataError
from distconv.jobs.timing import standard_deviation
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.strategy.selection import Strategy
from distconv.whole_files import write_picture

from .halo_picture import Halo, draw_halo
from .report import FIGURES
from .strong_scaling import Scaling

MOST_NAMES = 90
"""Maximum number of layers whose names are shown."""

STYLES = {"planned": ("tab:blue", "o"), "pure sample": ("tab:orange", "s"), "pure spatial": ("tab:green", "^")}
"""Colour and marker of each kind of parallelism."""


def check_format(path: Path) -> None:
    """Check that a figure can be written to ``path``.

    Raises
    ------
    DataError
        If matplotlib is not installed, or does not support the format of the suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise DataError(f"--plot {path}: matplotlib is not installed. Run pip install matplotlib.") from None
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise DataError(f"--plot {path}: unknown file format. Use a name that ends in one of {', '.join(formats)}.")


def draw(path: Path, strategy: Strategy, scaling: Scaling, *, halo: Halo | None, memory: float, title: str) -> None:
    """Draw a strategy: splits and times of layers, strong scaling, the largest halo, memory.

    Parameters
    ----------
    path : pathlib.Path
        File to write.
    strategy : Strategy
    scaling : Scaling
    halo : Halo or None
        The halo to draw, if there is one.
    memory : float
        Limit in bytes per rank.
    title : str
    """
    figure = new_figure((14.0, 10.0), title)
    grid = figure.add_gridspec(3, 3, height_ratios=[1.0, 1.6, 2.2], width_ratios=[2.2, 1.0, 0.6])
    splits = figure.add_subplot(grid[0, :])
    times = figure.add_subplot(grid[1, :], sharex=splits)
    _draw_splits(splits, strategy.prediction)
    _draw_times(times, strategy.prediction)
    draw_scaling(figure.add_subplot(grid[2, : 1 if halo else 2]), scaling, memory)
    if halo is not None:
        draw_halo(figure.add_subplot(grid[2, 1]), halo)
    draw_memory(figure.add_subplot(grid[2, 2]), strategy, memory)
    write_picture(path, figure, dpi=110)


def draw_measured(
    path: Path, scaling: Scaling, measured: Mapping[str, Mapping[int, Sequence[float]]], title: str
) -> None:
    """Draw predicted and measured step times.

    Parameters
    ----------
    path : pathlib.Path
        File to write.
    scaling : Scaling
        Predicted times.
    measured : mapping
        Seconds of each round, by kind of parallelism and number of ranks.
    title : str
    """
    figure = new_figure((9.0, 6.0), title)
    axis = figure.add_subplot()
    draw_scaling(axis, scaling, math.inf)
    for name, seconds in measured.items():
        colour, marker = STYLES[name]
        mean, spread = ([1e3 * f(times) for times in seconds.values()] for f in (statistics.fmean, standard_deviation))
        axis.errorbar(list(seconds), mean, spread, fmt=marker, color=colour, markersize=9, label=f"{name}, measured")
    axis.legend(fontsize=8)
    write_picture(path, figure, dpi=110)


def new_figure(size: tuple[float, float], title: str) -> Any:
    """Return an empty matplotlib figure.

    Parameters
    ----------
    size : (float, float)
        Width and height in inches.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def _draw_splits(axis: Any, prediction: Prediction) -> None:
    layers = list(prediction.layers.values())
    used = [name for name in AXES if any(layer.parts.get(name, 1) > 1 for layer in layers)] or ["n"]
    parts = np.array([[layer.parts.get(name, 1) for layer in layers] for name in used])
    axis.imshow(np.log2(parts), aspect="auto", cmap="Blues", vmin=0, vmax=max(1.0, 1.4 * np.log2(parts.max())))
    for (row, column), number in np.ndenumerate(parts):
        if number > 1 and len(layers) <= MOST_NAMES:
            axis.text(column, row, str(number), ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(used)), used)
    axis.set_title("parts along each axis", fontsize=9)
    axis.tick_params(labelbottom=False)


def _draw_times(axis: Any, prediction: Prediction) -> None:
    layers = list(prediction.layers.values())
    below = np.zeros(len(layers))
    for head, figure in FIGURES.items():
        times = np.array([1e3 * getattr(layer, figure) for layer in layers])
        axis.bar(range(len(layers)), times, bottom=below, width=0.85, label=head)
        below += times
    axis.set(ylabel="ms, without overlap")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # outside the axes, where it hides no bars
    if len(layers) <= MOST_NAMES:
        axis.set_xticks(range(len(layers)), list(prediction.layers), rotation=90, fontsize=6)


def draw_scaling(axis: Any, scaling: Scaling, memory: float) -> None:
    """Draw predicted times over ranks, with hollow markers where more than ``memory`` bytes per rank are needed.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    scaling : Scaling
    memory : float
        Limit in bytes per rank.
    """
    curves = scaling.curves
    for name, points in curves.items():
        colour, marker = STYLES[name]
        times = [1e3 * point.time for point in points.values()]
        axis.plot(list(points), times, color=colour, linewidth=1.0, label=f"{name}, predicted")
        for ranks, point in points.items():
            fill = "full" if point.memory <= memory else "none"
            axis.plot(ranks, 1e3 * point.time, marker, color=colour, markersize=5, fillstyle=fill)
    planned = curves["planned"]
    counts, first = list(planned), min(planned)
    ideal = [1e3 * planned[first].time * first / ranks for ranks in counts]
    axis.plot(counts, ideal, "--", color="0.7", linewidth=0.8, label="ideal")
    axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms per step")
    axis.set_xticks(counts, list(map(str, counts)))
    axis.set_xticks([], minor=True)
    for each in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        each("{x:g}")  # less than a decade has no major tick
    if scaling.profile_end is not None:
        last = counts.index(scaling.profile_end)
        edge = math.sqrt(counts[last] * counts[last + 1])  # half-way on a log axis
        axis.axvspan(edge, axis.get_xlim()[1], color="0.93", zorder=0, label="layers not measured: roofline")
        axis.set_xlim(right=axis.get_xlim()[1])
    axis.set_title("strong scaling" + (" (hollow: does not fit)" if memory < math.inf else ""), fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw_memory(axis: Any, strategy: Strategy, memory: float) -> None:
    """Draw the tensor memory of the rank with the peak, for the plan and for pure parallelism.

    Weights and optimizer state, which persist between steps, are shown separately.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    strategy : Strategy
    memory : float
        Limit in bytes per rank.
    """
    predictions = {"planned": strategy.prediction} | {
        f"pure {name}": alone for name, alone in strategy.uniform.items() if alone
    }
    lasting = [prediction.lasting / 1e9 for prediction in predictions.values()]
    others = [(prediction.memory - prediction.lasting) / 1e9 for prediction in predictions.values()]
    axis.bar(range(len(predictions)), lasting, color="tab:gray", label="weights, optimizer's state")
    bars = axis.bar(range(len(predictions)), others, bottom=lasting, color="tab:cyan", label="of a step")
    axis.bar_label(bars, [f"{prediction.memory / 1e9:.3g}" for prediction in predictions.values()], fontsize=7)
    if memory < 4 * max(prediction.memory for prediction in predictions.values()):  # else bars could not be told apart
        axis.axhline(memory / 1e9, color="tab:red", linewidth=1.0, label="limit")
    axis.set_xticks(range(len(predictions)), list(predictions), rotation=30, fontsize=7)
    axis.margins(y=0.2)
    axis.set(ylabel="GB")
    axis.set_title("tensors on the rank with the peak memory", fontsize=9)
    axis.legend(fontsize=7)
