"""Traces in Chrome's format, as torch.profiler writes them.

A duration event is ``{"ph": "X", "ts": microseconds, "dur": microseconds, "name": ..., "pid": ..., "tid": ...}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BEGIN = "distconv::begin"
"""Name of the profiler range that all ranks enter at the same time, after a barrier."""

Event = dict[str, Any]
Trace = Mapping[str, Any]


def duration_events(trace: Trace) -> list[Event]:
    """Return the events of a trace that have a duration.

    Parameters
    ----------
    trace : Trace
        Trace of one rank in Chrome's format.

    Returns
    -------
    list of Event
    """
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]


def merge_traces(traces: Sequence[Trace]) -> dict[str, Any]:
    """Merge the traces of all ranks on a common clock.

    Each rank becomes a process of the merged trace, and its processes and threads (Python's, the streams of a GPU)
    become threads of that process. The clocks agree at ``BEGIN``.

    Parameters
    ----------
    traces : sequence of mapping
        One trace for each rank.

    Returns
    -------
    dict
        The merged trace.
    """
    starts = [begin_time(trace) for trace in traces]
    events: list[Event] = []
    for rank, trace in enumerate(traces):
        events.append(_metadata_event("process_name", rank, 0, f"rank {rank}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        threads: dict[tuple[object, object], int] = {}
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" or "ts" not in event:
                continue
            # Ranks may have the same process and thread ids, on different nodes. They get numbers of their own.
            origin = event.get("pid"), event.get("tid")
            if origin not in threads:
                threads[origin] = len(threads)
                events.append(_metadata_event("thread_name", rank, threads[origin], f"{origin[0]} {origin[1]}"))
            moved = dict(event) | {"pid": rank, "tid": threads[origin], "ts": float(event["ts"]) - starts[rank]}
            if "id" in event:  # of a flow, and the same on several ranks
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def begin_time(trace: Trace) -> float:
    """Return the time of ``BEGIN`` in microseconds of the trace's own clock.

    Parameters
    ----------
    trace : Trace
        Trace of one rank in Chrome's format.

    Returns
    -------
    float
    """
    return min(float(event["ts"]) for event in duration_events(trace) if event["name"] == BEGIN)


def _metadata_event(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def spans(events: Iterable[Event], origin: float = 0.0) -> list[tuple[float, float]]:
    """Return the start and the end of each event, in microseconds from ``origin``.

    Parameters
    ----------
    events : iterable of Event
        Events with a duration.
    origin : float
        Time in microseconds that becomes 0.

    Returns
    -------
    list[tuple[float, float]]
    """
    return [(float(e["ts"]) - origin, float(e["ts"]) + float(e["dur"]) - origin) for e in events]
