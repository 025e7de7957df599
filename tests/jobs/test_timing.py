"""Variants take turns, and a time is that of the slowest rank."""

from __future__ import annotations

import time

import pytest

import distconv as dc
from distconv.communication import agreement
from distconv.jobs.timing import CPU, idle, medians, standard_deviation, time_action, time_interleaved, timed_variants


def test_the_deviation_is_that_of_a_sample() -> None:
    assert standard_deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert standard_deviation([7.0]) == 0.0


@pytest.mark.ranks(2, 3)
def test_a_time_is_that_of_the_slowest_rank_on_all_ranks(comm) -> None:
    found = time_action(comm, CPU, lambda: time.sleep(0.05 if comm.rank == 1 else 0.0))
    assert found >= 0.05
    assert comm.allgather(found) == [found] * comm.size


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("asleep", [False, True])
def test_variants_take_turns_and_the_first_rounds_do_not_count(comm, asleep: bool) -> None:
    done: list[str] = []

    def variant(name: str, seconds: float) -> float:
        done.append(name)
        return seconds + len(done) if comm.rank == 0 else 0.0

    variants = {"a": lambda: variant("a", 0.0), "b": lambda: variant("b", 100.0), "of others": idle}
    times = time_interleaved(comm, variants, 2, warm_up=1, asleep=asleep)
    assert done == ["a", "b"] * 3
    assert times == {"a": [3, 5], "b": [104, 106], "of others": [0, 0]}
    assert medians(times) == {"a": 4, "b": 105, "of others": 0}


def test_a_clock_runs_while_the_action_does() -> None:
    variants = timed_variants({"long": lambda: time.sleep(0.05), "short": lambda: None})
    assert variants["short"]() < 0.05 <= variants["long"]()


@pytest.mark.ranks(2)
def test_measured_steps_do_not_compare_the_order_of_operations(comm) -> None:
    of_layer = dc.ProcessGrid(comm, n=comm.size).world
    times = time_interleaved(comm, {"": lambda: float(agreement.is_order_checked(of_layer))}, 1)
    assert times == {"": [0.0]}
    assert agreement.is_order_checked(of_layer)
