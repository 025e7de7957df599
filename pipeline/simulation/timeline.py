"""When each pass of a schedule ran, simulated or measured, and what follows from it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from distconv.pipeline.schedules.actions import Schedule
from distconv.whole_files import write_file

from .gantt import draw
from .span import Span


@dataclass(frozen=True)
class Timeline:
    """The outcome of a simulation, or of a measurement.

    Times are in the unit of the costs, ``peak_activations`` in that of ``activation``.

    ``work``: time that passes and updates need, over all ranks. ``peak_activations``: for each stage the most that one
    rank held at a time, from the start of F to the end of the micro-batch's last gradient.
    """

    schedule: Schedule
    spans: list[Span]
    replicas: tuple[int, ...]
    work: float
    peak_activations: list[float]

    @property
    def makespan(self) -> float:
        """When the last pass or update ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time without work; 0 where nothing takes time."""
        offered = sum(self.replicas) * self.makespan
        return (offered - self.work) / offered if offered else 0.0

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw one row for each rank (a Gantt chart), in the format that the name's ending says.

        Raises
        ------
        ScheduleError
            If the path names no format, or is a folder.
        ImportError
            If matplotlib is not installed.
        """
        schedule = self.schedule
        title = f"{schedule.name}, {schedule.microbatches} micro-batches: {self.makespan:g}, bubble {self.bubble:.1%}"
        draw(schedule, self.spans, self.replicas, title, path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file for chrome://tracing or Perfetto: a process for each stage, a thread for each replica.

        Costs count as seconds.
        """
        names = [
            {"name": "process_name", "ph": "M", "pid": stage, "args": {"name": f"stage {stage}"}}
            for stage in range(len(self.schedule.stages))
        ]
        write_file(path, json.dumps({"traceEvents": names + [_event(span) for span in self.spans]}))


def _event(span: Span) -> dict[str, object]:
    action = span.action
    numbers = {"microbatch": action.microbatch, "chunk": action.chunk, "version": action.version}
    return {
        "name": f"{action.kind}" if action.microbatch is None else f"{action.kind}{action.microbatch}",
        "cat": str(action.kind),
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "pid": action.stage,
        "tid": span.replica,
        "args": {key: value for key, value in numbers.items() if value is not None},
    }
