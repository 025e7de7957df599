"""Every schedule can run, for any counts; its order is the one that its paper draws; bad input is one clear line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import FAMILIES, schedule, simulate, validate
from distconv.pipeline.schedules.generators import interleaved
from distconv.pipeline.schedules.memory import peak_memory

CASES = [
    *((name, {}) for name in FAMILIES),
    *(("interleaved", {"chunks": chunks}) for chunks in (1, 3, 4)),
    ("pipedream", {"vertical_sync": True}),
    ("stale", {"switch_after": 1}),
]


def draw_schedule(name, stages, microbatches, **options):
    return str(schedule(name, stages, microbatches, **options)).splitlines()[1:]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=25)
@given(stages=st.integers(1, 7), microbatches=st.integers(1, 20))
def test_a_schedule_of_any_size_is_valid_runs_and_holds_what_its_list_says(name, options, stages, microbatches):
    found = schedule(name, stages, microbatches, **options)
    validate(found)
    timeline = simulate(found, 1, 2, transfer=0.3, update=0.1)
    assert timeline.peak_activations == [memory.in_flight for memory in peak_memory(found)]


def test_gpipe_ends_all_forwards_first():
    assert draw_schedule("gpipe", 2, 3) == ["  stage 0: F0 F1 F2 B0 B1 B2", "  stage 1: F0 F1 F2 B0 B1 B2"]


def test_1f1b_is_that_of_figure_6a():
    assert draw_schedule("1f1b-sno", 3, 4) == [
        "  stage 0: F0 F1 F2 B0 F3 B1 B2 B3",
        "  stage 1: F0 F1 B0 F2 B1 F3 B2 B3",
        "  stage 2: F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_doubled_warm_up_is_that_of_figure_6b():
    assert draw_schedule("1f1b-so", 2, 6) == [
        "  stage 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "  stage 1: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    ]


def test_stale_weights_hold_a_mini_batch_for_twice_the_distance_to_the_end():
    assert draw_schedule("stale", 2, 5) == [
        "  stage 0: F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "  stage 1: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_hybrid_training_goes_on_one_mini_batch_at_a_time():
    assert draw_schedule("stale", 2, 4, switch_after=2) == [
        "  stage 0: F0 F1 B0 B1 F2 B2 F3 B3",
        "  stage 1: F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaving_takes_groups_of_as_many_micro_batches_as_stages():
    assert draw_schedule("interleaved", 2, 2) == [
        "  stage 0: F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "  stage 1: F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]


def test_interleaving_one_chunk_is_1f1b():
    assert draw_schedule("interleaved", 3, 7, chunks=1) == draw_schedule("1f1b-sno", 3, 7)


def test_a_smaller_last_group_keeps_the_order_of_a_whole_one():
    whole, part = interleaved(4, 8, 3), interleaved(4, 6, 3)
    assert part == [[step for step in steps if step.microbatch < 6] for steps in whole]


def test_zero_bubble_delays_w_by_the_index_of_the_stage():
    assert draw_schedule("zero-bubble", 3, 3) == [
        "  stage 0: F0 F1 F2 B0 W0 B1 W1 B2 W2",
        "  stage 1: F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "  stage 2: F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]


def test_replicas_of_a_stage_raise_what_it_has_on_the_way():
    row = draw_schedule("pipedream", 2, 6, replicas=[2, 1])[0]
    assert row == "  stage 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
