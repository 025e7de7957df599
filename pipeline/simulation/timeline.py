"""Timeline of a schedule, simulated or measured: makespan, bubble, plots."""

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
    """Result of a simulation or a measurement.

    Attributes
    ----------
    schedule : Schedule
    spans : list of Span
        Time of every pass and update.
    replicas : tuple of int
        Ranks of each stage.
    work : float
        Time that passes and updates need, summed over all ranks.
    peak_activations : list of float
        For each stage the most memory that one rank held, from the start of F to the end of the micro-batch's last
        gradient, in the unit of ``activation``. Of a measurement, it is the number of micro-batches in flight in the
        schedule.
    """

    schedule: Schedule
    spans: list[Span]
    replicas: tuple[int, ...]
    work: float
    peak_activations: list[float]

    @property
    def makespan(self) -> float:
        """End of the last pass or update."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time without work; 0 if nothing takes time."""
        offered = sum(self.replicas) * self.makespan
        return (offered - self.work) / offered if offered else 0.0

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a Gantt chart with one row for each rank.

        Parameters
        ----------
        path : str or path
            File to write; its ending selects the format, such as ``.png``.

        Raises
        ------
        ScheduleError
            If the path has no ending, or is a folder.
        ImportError
            If matplotlib is not installed.
        """
        schedule = self.schedule
        title = f"{schedule.name}, {schedule.microbatches} micro-batches: {self.makespan:g}, bubble {self.bubble:.1%}"
        draw(schedule, self.spans, self.replicas, title, path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file for chrome://tracing or Perfetto: a process for each stage, a thread for each replica.

        Times count as seconds.

        Parameters
        ----------
        path : str or path
            File to write.
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
        "ts": span.start * 1e6,  # the format has microseconds
        "dur": (span.end - span.start) * 1e6,
        "pid": action.stage,
        "tid": span.replica,
        "args": {key: value for key, value in numbers.items() if value is not None},
    }
