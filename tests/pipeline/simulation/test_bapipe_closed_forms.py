"""Simulated times, bubbles and feature memory against BaPipe's Tables I and II."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import schedule, simulate

COST = st.floats(0.01, 10)
CASES = settings(max_examples=50)
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


def demand(name, forward, backward):
    """The longest transfer that stays hidden: a link of a/F or 2a/(F+B), the last row of Table I."""
    return min(forward, backward) if name == "1f1b-as" else (forward + backward) / 2


@pytest.mark.parametrize("name", ["1f1b-as", "fbp-as"])
@CASES
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 18), forward=COST, backward=COST, share=st.floats(0, 1))
def test_a_link_that_is_as_fast_as_table_i_asks_hides_all_transfers(
    name, stages, microbatches, forward, backward, share
):
    check(name, stages, microbatches, forward, backward, share * demand(name, forward, backward))


@pytest.mark.parametrize("name", ["1f1b-as", "fbp-as"])
@CASES
@given(stages=st.integers(2, 6), microbatches=st.integers(1, 18), forward=COST, backward=COST, over=st.floats(1.01, 9))
def test_with_a_slower_one_a_mini_batch_takes_longer(name, stages, microbatches, forward, backward, over):
    transfer = over * demand(name, forward, backward)
    slow = simulate(schedule(name, stages, microbatches), forward, backward, transfer=transfer).makespan
    late = transfer - demand(name, forward, backward)
    # The first micro-batch is late at every boundary, in 1F1B-AS perhaps one way only; and two messages of one
    # direction never share a link.
    # Sums in another order differ by rounding: 4.299999999999999 for 4.2 + 0.1.
    rounded = 1 + 1e-12
    assert slow * rounded >= formula(name, stages, 1, forward, backward, 0) + (stages - 1) * late
    assert slow * rounded >= microbatches * transfer


def test_by_hand_two_stages_whose_link_takes_twice_a_forward_pass():
    """F = B = 1, t = 2: each message comes 1 s after its pass ends in 1F1B-AS, and 2 s in FBP-AS.

    1F1B-AS: F0 0-1, F0 on stage 1 2-3, B0 3-4, on stage 0 5-6.
    """
    assert simulate(schedule("1f1b-as", 2, 1), 1, 1, transfer=2).makespan == 6
    assert simulate(schedule("fbp-as", 2, 1), 1, 1, transfer=2).makespan == 8


@CASES
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 18), forward=COST, backward=COST, transfer=COST)
def test_time_bubble_and_memory_are_those_of_the_tables(stages, microbatches, forward, backward, transfer):
    check("1f1b-sno", stages, microbatches, forward, backward, transfer)


@pytest.mark.long
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
