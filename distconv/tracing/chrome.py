"""Traces in Chrome's format: what torch.profiler writes, and several of them on one clock.

An event that lasts is ``{"ph": "X", "ts": microseconds, "dur": microseconds, "name": ..., "pid": ..., "tid": ...}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BEGIN = "distconv::begin"
"""A range that all ranks enter at the same time, behind a barrier."""

Event = dict[str, Any]
Trace = Mapping[str, Any]


def lasting(trace: Trace) -> list[Event]:
    """The events of a trace that have a length."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """One trace of all ranks: a process for each, whose clocks agree where ``BEGIN`` starts.

    Threads and processes of a rank (Python's, a GPU's streams) are threads of its process here.
    """
    starts = [begin(trace) for trace in traces]
    events: list[Event] = []
    for rank, trace in enumerate(traces):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        threads: dict[tuple[object, object], int] = {}
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" or "ts" not in event:
                continue
            origin = event.get("pid"), event.get("tid")
            if origin not in threads:
                threads[origin] = len(threads)
                events.append(_named("thread_name", rank, threads[origin], f"{origin[0]} {origin[1]}"))
            moved = float(event["ts"]) - starts[rank]
            events.append(dict(event) | {"pid": rank, "tid": threads[origin], "ts": moved} | _apart(event, rank))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def begin(trace: Trace) -> float:
    """When ``BEGIN`` starts, in microseconds of the trace's own clock."""
    return min(float(event["ts"]) for event in lasting(trace) if event["name"] == BEGIN)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _apart(event: Event, rank: int) -> Event:
    """Arrows between events have numbers, which other ranks have too."""
    return {"id": f"{rank}.{event['id']}"} if "id" in event else {}


def spans(events: Iterable[Event], origin: float = 0.0) -> list[tuple[float, float]]:
    """Start and end of events, in microseconds from ``origin``."""
    return [(float(e["ts"]) - origin, float(e["ts"]) + float(e["dur"]) - origin) for e in events]
