"""BaPipe's closed forms, for equal and for unequal stages, against the event simulation of the same schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.perfmodel.stages.closed_forms import SCHEDULES, _longest_chains, in_flight, minibatch_time
from distconv.pipeline import schedule, simulate
from distconv.pipeline.reference.serial import IN_FLIGHT
from distconv.pipeline.schedules.memory import peak_memory

COST = st.floats(0.01, 10)
ENDING = [name for name, form in SCHEDULES.items() if not form.endless]


@pytest.mark.parametrize("name", ENDING)
@settings(max_examples=50)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 40), forward=COST, backward=COST, share=st.floats(0, 0.5))
def test_of_equal_stages_the_closed_form_is_the_simulated_time(name, stages, microbatches, forward, backward, share):
    # In GPipe a link is busy with as many messages as a stage is with passes of one direction. In 1F1B-AS, whose
    # simulation has links that one message follows the other on, transfers may be of any length.
    transfer = share * {"gpipe": 2 * min(forward, backward), "1f1b-as": 20.0}.get(name, forward + backward)
    found = minibatch_time(
        name, [forward] * stages, [backward] * stages, [transfer] * (stages - 1), microbatches=microbatches
    )
    simulated = simulate(schedule(name, stages, microbatches), forward, backward, transfer=transfer).makespan
    assert found == pytest.approx(simulated, rel=1e-12)


# Smallest and largest ratio to the simulated time, and the largest mean: what schedule_costs.py says of 600 pipelines.
UNEQUAL = {
    "1f1b-as": (1.0, 1.17, 1.03),
    "1f1b-sno": (1.0, 1.15, 1.02),
    "1f1b-so": (0.996, 1.22, 1.04),
    "fbp-as": (0.996, 1.23, 1.04),
    "gpipe": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", ENDING)
def test_of_unequal_stages_the_closed_form_is_a_little_longer_than_the_simulated_time(name):
    ratios = [_ratio(name, random.Random(seed)) for seed in range(150)]
    least, most, mean = UNEQUAL[name]
    assert least - 1e-9 <= min(ratios) and max(ratios) <= most + 1e-9 and sum(ratios) / len(ratios) <= mean + 1e-9


def _ratio(name, rng):
    stages, microbatches = rng.randint(2, 6), rng.choice([1, 2, 4, 8, 16, 32])
    forward = [1 + rng.random() for _ in range(stages)]
    backward = [2 * cost * (1 + 0.2 * rng.random()) for cost in forward]
    transfer = [rng.random() for _ in range(stages)]
    simulated = simulate(schedule(name, stages, microbatches), forward, backward, transfer=transfer).makespan
    return minibatch_time(name, forward, backward, transfer[:-1], microbatches) / simulated


@pytest.mark.parametrize("name", ENDING)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 18))
def test_activations_in_flight_are_those_of_the_schedule(name, stages, microbatches):
    listed = [stage.in_flight for stage in peak_memory(schedule(name, stages, microbatches))]
    assert in_flight(name, stages, microbatches) == listed


@given(
    chains=st.dictionaries(st.integers(2, 9), COST, max_size=4),
    single=COST,
    microbatches=st.integers(0, 60),
)
def test_the_worst_chains_are_those_of_the_whole_knapsack(chains, single, microbatches):
    every = [(1, single), *chains.items()]
    best = [0.0]
    for size in range(1, microbatches + 1):
        best.append(max([best[-1], *(best[size - count] + time for count, time in every if count <= size)]))
    assert _longest_chains(every, microbatches) == pytest.approx(best[-1], rel=1e-12)


@pytest.mark.parametrize("name", ["pipedream", "stale"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_an_endless_schedule_has_as_many_mini_batches_under_way_as_the_serial_pipeline(name, stages):
    assert in_flight(name, stages, 1) == [IN_FLIGHT[name](stages, stage) for stage in range(stages)]


@pytest.mark.parametrize("name", ["pipedream", "stale"])
def test_an_endless_schedule_takes_what_its_slowest_chain_takes_for_each_mini_batch(name):
    """Two stages of 9 and 9 - 1 s: their chain of both and the transfers serves two mini-batches, or three."""
    found = minibatch_time(name, [3.0, 3.0], [6.0, 5.0], [0.5], 1)
    chain = 9.0 + 8.0 + 2 * 0.5
    assert found == max(9.0, chain / (2 if name == "pipedream" else 3))
    spans = [
        simulate(schedule(name, 2, count), [3.0, 3.0], [6.0, 5.0], transfer=[0.5, 0.0]).makespan for count in (20, 40)
    ]
    assert (spans[1] - spans[0]) / 20 == pytest.approx(found)
