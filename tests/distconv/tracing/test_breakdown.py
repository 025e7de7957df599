"""Parts of the time of traces written by hand."""

from __future__ import annotations

import pytest

from distconv.tracing.breakdown import Breakdown, breakdown, describe_slowest_rank, format_table


def event(name, start, end, cat="user_annotation", tid=1):
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "pid": 7, "tid": tid}


def traced(*events, end=100.0):
    marks = [event("distconv::begin", 1000.0, 1000.5), event("distconv::end", 1000.0 + end, 1000.5 + end)]
    moved = [each | {"ts": each["ts"] + 1000.0} for each in events]
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *marks, *moved]}


def test_each_moment_counts_once_and_the_innermost_part_has_it():
    found = breakdown(
        traced(
            event("autograd::engine::evaluate_function", 10, 60, "cpu_op"),
            event("distconv::halo", 20, 50),
            event("distconv::wait", 30, 45),
            event("aten::copy_", 22, 28, "cpu_op"),  # part of the packing
            event("distconv::allreduce", 70, 80),
            event("distconv::wait", 75, 78),
        ),
        rank=3,
    )
    microseconds = {part: round(1e6 * value, 6) for part, value in found.seconds.items()}
    assert microseconds == {"compute": 20, "halo": 15, "wait": 15, "allreduce": 10, "between": 40}
    assert found.rank == 3 and found.total == pytest.approx(100e-6)
    assert found.own_work == pytest.approx(75e-6)


def test_what_lies_outside_does_not_count():
    found = breakdown(traced(event("aten::mm", -50, 10, "cpu_op"), event("aten::mm", 90, 250, "cpu_op")), 0)
    assert found.seconds["compute"] == pytest.approx(20e-6)


def test_kernels_of_a_gpu_hide_what_goes_on_beside_them():
    found = breakdown(
        traced(
            event("sgemm", 0, 50, "kernel", tid=2),
            event("ncclDevKernel_AllReduce_Sum", 40, 70, "kernel", tid=3),
            event("ncclDevKernel_SendRecv", 60, 80, "kernel", tid=4),
            event("distconv::wait", 0, 10),
        ),
        0,
    )
    microseconds = {part: round(1e6 * value, 6) for part, value in found.seconds.items()}
    assert microseconds == {"compute": 50, "halo": 0, "wait": 10, "allreduce": 20, "between": 20}


def rank(number, compute, wait):
    seconds = {"compute": compute, "halo": 0.0, "wait": wait, "allreduce": 0.0, "between": 0.0}
    return Breakdown(number, compute + wait, seconds)


def test_the_rank_that_others_wait_for_is_named():
    found = [rank(0, 1.0, 0.5), rank(1, 1.5, 0.0), rank(2, 1.1, 0.4)]
    assert describe_slowest_rank(found).startswith("rank 1 is slow: its own work takes 1.43 times")
    assert "no rank is slow" in describe_slowest_rank(found[::2])
    assert "no rank is slow" in describe_slowest_rank(found[:1])


def test_the_table_is_of_one_step():
    head, row, last = format_table([rank(0, 1.0, 0.5)], steps=5).splitlines()
    assert head.split() == ["rank", "compute", "halo", "wait", "allreduce", "between", "step", "ms"]
    assert row.split() == ["0", "200.000", "0.000", "100.000", "0.000", "0.000", "300.000"]
    assert last.startswith("no rank")
