"""Traces of several ranks on one clock."""

from __future__ import annotations

from distconv.tracing.chrome import merge_traces


def trace(clock, at, pid):
    begin = {"ph": "X", "name": "distconv::begin", "ts": clock, "dur": 1, "pid": pid, "tid": 1}
    other = {"ph": "X", "name": "aten::add", "ts": clock + at, "dur": 2, "pid": pid, "tid": 9}
    arrow = {"ph": "s", "name": "fwdbwd", "ts": clock + at, "pid": pid, "tid": 9, "id": 4}
    return {"traceEvents": [{"ph": "M", "name": "thread_name", "pid": pid, "tid": 1}, begin, other, arrow]}


def test_the_beginnings_meet_and_each_rank_is_a_process():
    found = merge_traces([trace(500.0, 10, 77), trace(9000.25, 20, 77)])["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in found if e["name"] == "distconv::begin"] == [(0, 0), (1, 0)]
    assert [(e["pid"], e["ts"]) for e in found if e["name"] == "aten::add"] == [(0, 10), (1, 20)]
    names = [(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")]
    assert [e["id"] for e in found if e["ph"] == "s"] == ["0.4", "1.4"]
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"]
    assert threads == [(0, 0, "77 1"), (0, 1, "77 9"), (1, 0, "77 1"), (1, 1, "77 9")]
