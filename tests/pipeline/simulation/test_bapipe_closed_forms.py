"""Simulated times, bubbles and feature memory against BaPipe's Tables I and II."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import schedule, simulate

COST = st.floats(0.01, 10)
CASES = settings(max_examples=200)
EXACT = 1e-12


def formula(name, stages, microbatches, forward, backward, transfer):
    """Mini-batch time; N, M, F, B and SR in the paper's names."""
    time = (microbatches + stages - 1) * (forward + backward)
    if name == "1f1b-sno":
        time += (stages + microbatches - 2 - math.ceil((microbatches - 1) / stages)) * 2 * transfer
    if name == "1f1b-so":
        time += (stages - 1) * 2 * transfer
    return time


def check(name, stages, microbatches, forward, backward, transfer):
    timeline = simulate(schedule(name, stages, microbatches), forward, backward, transfer=transfer)
    time = formula(name, stages, microbatches, forward, backward, transfer)
    assert timeline.makespan == pytest.approx(time, rel=EXACT)
    assert timeline.bubble == pytest.approx(1 - microbatches * (forward + backward) / time, abs=EXACT)
    copies = 2 if name in ("1f1b-so", "fbp-as") else 1
    in_flight = [min(microbatches, copies * (stages - stage)) for stage in range(stages)]
    assert timeline.peak_activations == in_flight


@pytest.mark.parametrize("name", ["1f1b-as", "fbp-as", "1f1b-sno"])
@CASES
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 18), forward=COST, backward=COST, transfer=COST)
def test_time_bubble_and_memory_are_those_of_the_tables(name, stages, microbatches, forward, backward, transfer):
    check(name, stages, microbatches, forward, backward, transfer)


@CASES
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 18), forward=COST, backward=COST, share=st.floats(0, 1))
def test_doubled_warm_up_hides_transfers_of_up_to_half_a_pass(stages, microbatches, forward, backward, share):
    check("1f1b-so", stages, microbatches, forward, backward, share * (forward + backward) / 2)


def test_doubled_warm_up_cannot_hide_longer_transfers():
    """The table's formula has this limit; the simulation goes on beyond it."""
    found = simulate(schedule("1f1b-so", 4, 30), 1, 2, transfer=5).makespan
    assert found > formula("1f1b-so", 4, 30, 1, 2, 5)


@pytest.mark.parametrize(("name", "time"), [("1f1b-as", 30), ("fbp-as", 30), ("1f1b-sno", 36), ("1f1b-so", 32)])
def test_the_example_of_three_stages_and_eight_micro_batches(name, time):
    assert simulate(schedule(name, 3, 8), 1, 2, transfer=0.5).makespan == time
