"""Gantt charts of timelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distconv.pipeline.schedules.actions import Kind, Schedule, ScheduleError
from distconv.whole_files import write_picture

from .span import Span

COLOURS = {Kind.F: "#9ecae1", Kind.B: "#a1d99b", Kind.W: "#fdd0a2", Kind.UPDATE: "#bcbddc"}
ROW_INCHES = 0.45

LABELS_AT_MOST = 600
"""Most passes that are labelled with their micro-batch; more labels would be illegible."""


def draw(
    schedule: Schedule, spans: Sequence[Span], replicas: Sequence[int], title: str, path: str | os.PathLike[str]
) -> None:
    """Write a figure with one row for each rank. If F and B share a rank, B is the lower half of its row.

    Parameters
    ----------
    schedule : Schedule
    spans : sequence of Span
    replicas : sequence of int
        Ranks of each stage.
    title : str
    path : str or path
        File to write; its ending selects the format.

    Raises
    ------
    ScheduleError
        If the path has no ending, or is a folder.
    ImportError
        If matplotlib is not installed.
    """
    if os.path.isdir(path) or not os.path.splitext(path)[1]:
        raise ScheduleError(
            f"plot: {os.fspath(path)!r} has no extension that determines the format; use a name such as figure.png"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 1.6 + ROW_INCHES * sum(replicas)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    draw_spans(axis, schedule, spans, replicas)
    axis.set(xlabel="time, in the unit of the costs", title=title)
    write_picture(path, figure, dpi=130)


def draw_spans(axis: Any, schedule: Schedule, spans: Sequence[Span], replicas: Sequence[int]) -> None:
    """Draw the rows on given axes of matplotlib. The caller labels the unit of time.

    Parameters
    ----------
    axis : Axes
    schedule, spans, replicas
        As in :func:`draw`.
    """
    from matplotlib.patches import Patch  # matplotlib is optional

    rows = [(stage, replica) for stage, count in enumerate(replicas) for replica in range(count)]
    seen = [span for span in spans if span.end > span.start]
    for span in seen:
        _draw_span(axis, span, rows.index((span.action.stage, span.replica)), schedule, len(spans) <= LABELS_AT_MOST)
    single = all(replica == 0 for _, replica in rows)
    axis.set_yticks(range(len(rows)), [f"stage {s}" if single else f"stage {s}, replica {r}" for s, r in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, max((span.end for span in seen), default=1))
    shown = {span.action.kind for span in seen}
    patches = [Patch(color=colour, label=str(kind)) for kind, colour in COLOURS.items() if kind in shown]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)  # to the right of the rows


def _draw_span(axis: Any, span: Span, row: int, schedule: Schedule, numbered: bool) -> None:
    halves = schedule.concurrent and span.action.kind in (Kind.F, Kind.B)
    height = 0.4 if halves else 0.8
    middle = row + (0.0 if not halves else -0.2 if span.action.kind is Kind.F else 0.2)
    width = span.end - span.start
    # Later chunks of a stage are darker.
    alpha = 1.0 if schedule.chunks == 1 else 0.5 + 0.5 * span.action.chunk / (schedule.chunks - 1)
    colour = COLOURS[span.action.kind]
    axis.barh(middle, width, height, span.start, color=colour, alpha=alpha, edgecolor="0.3", linewidth=0.4)
    if span.action.microbatch is not None and numbered:
        axis.text(span.start + width / 2, middle, span.action.microbatch, ha="center", va="center", fontsize=7)
