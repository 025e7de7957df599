"""The figure of an exploration: candidates, memory of the stages, and the timeline of the choice.

Called by ``distconv explore --plot``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from distconv.perfmodel import Exploration
from distconv.perfmodel.exploration.choices import Choice
from distconv.pipeline.simulation.gantt import ROW_INCHES, draw_spans
from distconv.whole_files import write_picture

from .chosen_pipeline import split_points, timeline
from .picture import new_figure

MOST_CHOICES = 16
"""Maximum number of combinations in the figure."""

CHOSEN, FITS, TOO_MUCH = "tab:blue", "0.75", "tab:red"


def draw(path: Path, exploration: Exploration) -> None:
    """Draw the figure and write it to ``path``, whose suffix selects the format.

    Parameters
    ----------
    path : pathlib.Path
    exploration : Exploration
        Result of the search.
    """
    best, shown = exploration.best, shown_choices(exploration)
    passes = timeline(best)
    heights = (1.0 + 0.22 * len(shown), 1.0 + ROW_INCHES * sum(passes.replicas))
    title = f"{exploration.question}: {label(best)}, {1e3 * best.time:.4g} ms"
    figure = new_figure((12.0, 1.0 + sum(heights)), title)
    grid = figure.add_gridspec(2, 2, height_ratios=heights, width_ratios=(3, 1))
    _draw_choices(figure.add_subplot(grid[0, 0]), shown, best, len(exploration.table))
    _draw_memory(figure.add_subplot(grid[0, 1]), best, exploration.room)
    axis = figure.add_subplot(grid[1, :])
    spans = [replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in passes.spans]
    draw_spans(axis, passes.schedule, spans, passes.replicas)
    axis.set(xlabel="ms, predicted")
    axis.set_title(f"passes of the choice: bubble {passes.bubble:.1%}", fontsize=9)
    write_picture(path, figure, dpi=110)


def shown_choices(exploration: Exploration) -> list[Choice]:
    """Return the fastest combinations, including those that do not fit, and the choice.

    If several combinations have the same label, the choice is kept, otherwise the fastest.

    Parameters
    ----------
    exploration : Exploration

    Returns
    -------
    list of Choice
        At most ``MOST_CHOICES``, by time.
    """
    by_time = sorted(exploration.table, key=lambda choice: (choice is not exploration.best, choice.time))
    different = list({label(choice): choice for choice in reversed(by_time)}.values())
    shown = sorted(different, key=lambda choice: choice.time)[:MOST_CHOICES]
    return shown if exploration.best in shown else [*shown[:-1], exploration.best]


def label(choice: Choice) -> str:
    """Return a short description of a combination."""
    stages, replicas = len(choice.memory), choice.replicas
    parts = [choice.schedule, f"{stages} stage{'s' * (stages > 1)}"]
    parts += [f"{replicas} replicas"] if replicas > 1 else []
    parts += [f"{choice.width} ranks each"] if choice.width > 1 else []
    return ", ".join([*parts, f"{choice.microbatches} micro-batches"])


def _draw_choices(axis: Any, shown: list[Choice], best: Choice, looked_at: int) -> None:
    times = [1e3 * choice.time for choice in shown]
    colours = [CHOSEN if choice is best else FITS if choice.fits else "none" for choice in shown]
    edges = [FITS if choice.fits else TOO_MUCH for choice in shown]
    axis.barh(range(len(shown)), times, color=colours, edgecolor=edges, height=0.75)
    for row, time in enumerate(times):
        axis.text(time, row, f" {time:.4g}", va="center", fontsize=7)
    axis.set_yticks(range(len(shown)), [label(choice) for choice in shown], fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set(xlabel="ms of a mini-batch, predicted")
    axis.set_title(f"fastest of {looked_at} combinations (blue: chosen; red: does not fit)", fontsize=9)


def _draw_memory(axis: Any, best: Choice, limit: float) -> None:
    bars = axis.bar(range(len(best.memory)), [size / 1e9 for size in best.memory], color=CHOSEN)
    axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.axhline(limit / 1e9, color=TOO_MUCH, linewidth=1.0)
    axis.text(-0.4, limit / 1e9, f"limit: {limit / 1e9:.3g} GB", color=TOO_MUCH, fontsize=7, va="bottom")
    axis.set_ylim(0.0, 1.15 * limit / 1e9)
    begins = ["input", *split_points(best)]
    names = [f"{stage}: {begin}" for stage, (begin, _) in enumerate(pairwise([*begins, "output"]))]
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axis.set(ylabel="GB of a rank, predicted")
    axis.set_title("stages, by their first and last layer", fontsize=9)
