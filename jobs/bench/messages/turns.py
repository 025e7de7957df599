"""Times of actions that take turns, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from mpi4py import MPI

from distconv.jobs.bench import report
from distconv.jobs.bench.comparison import timed

WARM_UP = 5


def in_turns(comm: MPI.Intracomm, actions: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each action, until the slowest rank has done it. Collective."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(turns + WARM_UP):
        for name, action in actions.items():
            slowest = timed(comm, torch.device("cpu"), action)
            if turn >= WARM_UP:
                times[name].append(slowest)
    return times


def table(times: Mapping[str, list[float]], reference: str) -> str:
    """A line for each action, with the ratio of medians to that of ``reference``."""
    head = report.table_head("ms", f"to {reference}")
    median = statistics.median(times[reference])
    return "\n".join([head, *(report.row(name, values, median) for name, values in times.items())])


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """For JSON."""
    return {name: statistics.median(values) for name, values in times.items()}
