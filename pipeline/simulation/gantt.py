"""A timeline as a picture."""

from __future__ import annotations

import os
from typing import Any

from distconv.pipeline.schedules.actions import Kind, ScheduleError

from .timeline import Span, Timeline

COLOURS = {Kind.F: "#9ecae1", Kind.B: "#a1d99b", Kind.W: "#fdd0a2", Kind.UPDATE: "#bcbddc"}
LABELS_AT_MOST = 600
"""More passes than this carry no number: it could not be read."""


def draw(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the picture: a row for each rank; where F and B share a rank, B is the lower half of its row.

    Raises
    ------
    ScheduleError
        If the path names no format, or is a folder.
    ImportError
        If matplotlib is not installed.
    """
    if os.path.isdir(path) or not os.path.splitext(path)[1]:
        raise ScheduleError(f"plot: {os.fspath(path)!r} has no ending that says the format; write picture.png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(stage, replica) for stage, count in enumerate(timeline.replicas) for replica in range(count)]
    figure = Figure(figsize=(12.0, 1.6 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    seen = [span for span in timeline.spans if span.end > span.start]
    for span in seen:
        _draw_span(axis, span, rows.index((span.action.stage, span.replica)), timeline)
    _label(axis, rows, timeline, {span.action.kind for span in seen})
    figure.savefig(path, dpi=130)


def _draw_span(axis: Any, span: Span, row: int, timeline: Timeline) -> None:
    halves = timeline.schedule.concurrent and span.action.kind in (Kind.F, Kind.B)
    height = 0.4 if halves else 0.8
    middle = row + (0.0 if not halves else -0.2 if span.action.kind is Kind.F else 0.2)
    width = span.end - span.start
    # Later chunks of a stage are darker.
    alpha = 1.0 if timeline.schedule.chunks == 1 else 0.5 + 0.5 * span.action.chunk / (timeline.schedule.chunks - 1)
    colour = COLOURS[span.action.kind]
    axis.barh(middle, width, height, span.start, color=colour, alpha=alpha, edgecolor="0.3", linewidth=0.4)
    if span.action.microbatch is not None and len(timeline.spans) <= LABELS_AT_MOST:
        axis.text(span.start + width / 2, middle, span.action.microbatch, ha="center", va="center", fontsize=7)


def _label(axis: Any, rows: list[tuple[int, int]], timeline: Timeline, shown: set[Kind]) -> None:
    from matplotlib.patches import Patch

    single = max(timeline.replicas) == 1
    names = [f"stage {stage}" if single else f"stage {stage}, replica {replica}" for stage, replica in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set_xlim(0, timeline.makespan or 1)
    axis.set_xlabel("time")
    schedule = timeline.schedule
    axis.set_title(
        f"{schedule.name}, {schedule.microbatches} micro-batches: {timeline.makespan:g}, bubble {timeline.bubble:.1%}"
    )
    patches = [Patch(color=colour, label=str(kind)) for kind, colour in COLOURS.items() if kind in shown]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
