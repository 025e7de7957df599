"""Where the time of a trace went: parts of it that add up, for each rank.

::

    compute    torch's operators, of a GPU its kernels
    halo       packing, sending and unpacking of boxes: halos, redistributions, sums of shares
    allreduce  sums over ranks: waiting for the others in them, too
    wait       until messages of others are there
    between    Python, and whatever else is none of these

At each moment one of them counts: a wait inside a halo exchange is a wait, an operator inside the packing is part of
that. So they add up to the length of the trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distconv.tracing.chrome import Event, Trace, begin, lasting, spans

END = "distconv::end"
"""A range that a rank enters when it has done its part."""

SLOW = 1.1
"""A rank whose own work takes so many times the median is named."""

PARTS = {
    "allreduce": frozenset({"distconv::allreduce"}),
    "wait": frozenset({"distconv::wait"}),
    "halo": frozenset(f"distconv::{name}" for name in ("pack", "unpack", "halo", "redistribute", "share_out", "post")),
}
"""Ranges of what is no computation; where one is inside another, the first of these counts."""

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one rank. ``seconds`` has each part; they add up to ``total``."""

    rank: int
    total: float
    seconds: dict[str, float]

    @property
    def own(self) -> float:
        """What the rank did itself: everything but waiting for others and sums."""
        return self.total - self.seconds["wait"] - self.seconds["allreduce"]


def breakdown(trace: Trace, rank: int) -> Breakdown:
    """The parts of the time from ``BEGIN`` to ``END``."""
    events = lasting(trace)
    origin = begin(trace)
    total = max(float(event["ts"]) for event in events if event["name"] == END) - origin
    groups = _groups(events)
    edges = np.unique(
        np.clip([0.0, total, *(edge for _, group in groups for s in spans(group, origin) for edge in s)], 0, total)
    )
    taken = np.zeros(max(0, len(edges) - 1), dtype=bool)
    lengths, seconds = np.diff(edges), dict.fromkeys(("compute", "halo", "wait", "allreduce"), 0.0)
    for part, group in groups:
        covered = _covered(edges, spans(group, origin)) & ~taken
        seconds[part] += float(lengths[covered].sum()) / 1e6
        taken |= covered
    seconds["between"] = float(lengths[~taken].sum()) / 1e6
    return Breakdown(rank, total / 1e6, seconds)


def _groups(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Parts and their events: where several run, the first counts. A GPU's kernels hide what goes on beside them."""
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


def _covered(edges: npt.NDArray[np.float64], intervals: Sequence[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Which of the stretches between ``edges`` lie in some of the spans."""
    depth = np.zeros(len(edges), dtype=np.int64)
    if intervals and len(edges):
        starts, ends = (np.clip(np.array(side), edges[0], edges[-1]) for side in zip(*intervals, strict=True))
        np.add.at(depth, np.searchsorted(edges, starts), 1)
        np.add.at(depth, np.searchsorted(edges, ends), -1)
    return np.cumsum(depth)[:-1] > 0


def table(breakdowns: Sequence[Breakdown], steps: int = 1) -> str:
    """The parts in ms a step, a row for each rank, and which rank the others wait for."""
    head = ["rank", *breakdowns[0].seconds, "step"]
    lines = ["  ".join(f"{name:>9}" for name in head) + "  ms"]
    for each in breakdowns:
        cells = [1e3 * value / steps for value in (*each.seconds.values(), each.total)]
        lines.append("  ".join([f"{each.rank:>9}", *(f"{cell:>9.3f}" for cell in cells)]))
    return "\n".join([*lines, verdict(breakdowns)])


def verdict(breakdowns: Sequence[Breakdown]) -> str:
    """Which rank is slow, in a sentence."""
    slowest = max(breakdowns, key=lambda each: each.own)
    usual = (
        statistics.median(each.own for each in breakdowns if each is not slowest)
        if len(breakdowns) > 1
        else slowest.own
    )
    if usual and slowest.own > SLOW * usual:
        return (
            f"rank {slowest.rank} is slow: its own work takes {slowest.own / usual:.2f} times that of the others, "
            "which wait for it"
        )
    return f"no rank is slow: own work differs by less than {SLOW - 1:.0%}"
