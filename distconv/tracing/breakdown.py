"""Breakdown of the time of a trace for each rank.

::

    compute    torch operators; on a GPU, kernels
    halo       packing, sending and unpacking: halo exchanges, redistributions, reduce-scatters
    allreduce  all-reduces, including the wait for other ranks in them
    wait       waiting for messages of other ranks; on a GPU also NCCL kernels other than all-reduces
    between    Python, and everything else

Each moment counts for one part only: a wait inside a halo exchange is a wait, an operator inside packing belongs to the
halo. A moment at which a GPU runs a kernel counts for the kernel, whatever the CPU does. The parts therefore add up to
the length of the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distconv.tracing.chrome import Event, Trace, begin_time, duration_events, spans

END = "distconv::end"
"""Name of the profiler range that marks the end of a rank's own work."""

SLOW = 1.1
"""A rank is reported as slow if its own work takes more than this multiple of the other ranks' median."""

PARTS = {
    "allreduce": frozenset({"distconv::allreduce"}),
    "wait": frozenset({"distconv::wait"}),
    "halo": frozenset(f"distconv::{name}" for name in ("pack", "unpack", "halo", "redistribute", "share_out", "post")),
}
"""Profiler ranges of communication by part. Where ranges are nested, the first part in this order counts."""

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Breakdown:
    """The time of one rank.

    Parameters
    ----------
    rank : int
    total : float
        Length of the trace in seconds.
    seconds : dict of str to float
        Seconds of each part, which add up to ``total``.
    """

    rank: int
    total: float
    seconds: dict[str, float]

    @property
    def own_work(self) -> float:
        """Seconds without waits and all-reduces."""
        return self.total - self.seconds["wait"] - self.seconds["allreduce"]


def breakdown(trace: Trace, rank: int) -> Breakdown:
    """Return the breakdown of the time between the markers ``BEGIN`` and ``END``.

    Parameters
    ----------
    trace : mapping
        The trace of one rank, in Chrome's format.
    rank : int
        Rank that the trace is from.

    Returns
    -------
    Breakdown
    """
    events = duration_events(trace)
    origin = begin_time(trace)
    # With a GPU the marker is on several tracks of a trace: the last one counts.
    total = max(float(event["ts"]) for event in events if event["name"] == END) - origin
    groups = _groups(events)
    # Between two edges nothing begins or ends, so each interval counts for one part.
    edges = np.unique(
        np.clip([0.0, total, *(edge for _, group in groups for s in spans(group, origin) for edge in s)], 0, total)
    )
    taken = np.zeros(max(0, len(edges) - 1), dtype=bool)
    lengths, seconds = np.diff(edges), dict.fromkeys(("compute", "halo", "wait", "allreduce"), 0.0)
    for part, group in groups:
        # A moment that a part of higher priority has taken does not count again.
        covered = _is_covered(edges, spans(group, origin)) & ~taken
        seconds[part] += float(lengths[covered].sum()) / 1e6
        taken |= covered
    seconds["between"] = float(lengths[~taken].sum()) / 1e6
    return Breakdown(rank, total / 1e6, seconds)


def _groups(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Return parts with their events, by priority: at a moment when several run, the first part counts.

    GPU kernels come first, as they overlap with the work of the CPU.
    """
    # The GPU first: while it runs a kernel, the CPU may already be several operators ahead.
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    messages = [event for event in kernels if str(event["name"]).startswith("nccl")]
    sums = [event for event in messages if "AllReduce" in event["name"]]
    return [
        ("compute", [event for event in kernels if not str(event["name"]).startswith("nccl")]),
        ("allreduce", sums),
        ("wait", [event for event in messages if "AllReduce" not in event["name"]]),
        *((part, [event for event in events if event["name"] in names]) for part, names in PARTS.items()),
        ("compute", [event for event in events if event.get("cat") == "cpu_op"]),
    ]


def _is_covered(edges: npt.NDArray[np.float64], intervals: Sequence[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Return True for each interval between consecutive ``edges`` that lies in one of ``intervals``."""
    depth = np.zeros(len(edges), dtype=np.int64)
    if intervals and len(edges):
        starts, ends = (np.clip(np.array(side), edges[0], edges[-1]) for side in zip(*intervals, strict=True))
        # add.at, since several intervals may begin at one edge.
        np.add.at(depth, np.searchsorted(edges, starts), 1)
        np.add.at(depth, np.searchsorted(edges, ends), -1)
    return np.cumsum(depth)[:-1] > 0


def format_table(breakdowns: Sequence[Breakdown], steps: int = 1) -> str:
    """Return a table of the parts in milliseconds per step, and a sentence about slow ranks.

    Parameters
    ----------
    breakdowns : sequence of Breakdown
        One for each rank, which becomes a row.
    steps : int
        Number of steps in the trace.

    Returns
    -------
    str
    """
    head = ["rank", *breakdowns[0].seconds, "step"]
    lines = ["  ".join(f"{name:>9}" for name in head) + "  ms"]
    for each in breakdowns:
        cells = [1e3 * value / steps for value in (*each.seconds.values(), each.total)]
        lines.append("  ".join([f"{each.rank:>9}", *(f"{cell:>9.3f}" for cell in cells)]))
    return "\n".join([*lines, describe_slowest_rank(breakdowns)])


def describe_slowest_rank(breakdowns: Sequence[Breakdown]) -> str:
    """Return a sentence that says which rank is slow, if any.

    Parameters
    ----------
    breakdowns : sequence of Breakdown
        One breakdown per rank.

    Returns
    -------
    str
    """
    slowest = max(breakdowns, key=lambda each: each.own_work)
    usual = (
        statistics.median(each.own_work for each in breakdowns if each is not slowest)
        if len(breakdowns) > 1
        else slowest.own_work
    )
    if usual and slowest.own_work > SLOW * usual:
        return (
            f"rank {slowest.rank} is slow: its own work takes {slowest.own_work / usual:.2f} times that of the others, "
            "which wait for it"
        )
    return f"no rank is slow: own work differs by less than {SLOW - 1:.0%}"
