"""Memory and staleness, read off the schedules' own lists, against the papers."""

from __future__ import annotations

import pytest

from distconv.pipeline import ScheduleError, schedule
from distconv.pipeline.schedules.memory import peak_memory, stale_fraction, staleness


@pytest.mark.parametrize("pairs", range(1, 10))
def test_staleness_of_stage_i_is_twice_its_distance_to_the_end(pairs):
    """Stale weights, 4.1: K register pairs, stages 1..K+1, 2(K - i + 1) cycles."""
    found = schedule("stale", pairs + 1, 5 * pairs + 5)
    assert staleness(found) == [2 * (pairs - i + 1) for i in range(1, pairs + 2)]


@pytest.mark.parametrize("pairs", range(1, 10))
def test_activations_are_kept_for_as_many_cycles_as_weights_are_stale(pairs):
    """The copies beside the micro-batch at work; and a single copy of the weights."""
    memory = peak_memory(schedule("stale", pairs + 1, 5 * pairs + 5))
    assert [stage.in_flight - 1 for stage in memory] == [2 * (pairs - i + 1) for i in range(1, pairs + 2)]
    assert {stage.versions for stage in memory} == {1}


@pytest.mark.parametrize("pairs", range(1, 10))
def test_all_weights_before_the_last_register_pair_are_stale(pairs):
    weights = [3.0 + stage for stage in range(pairs + 1)]
    found = stale_fraction(schedule("stale", pairs + 1, 5 * pairs + 5), weights)
    assert found == pytest.approx(sum(weights[:-1]) / sum(weights))


def test_no_weights_at_all_have_no_stale_fraction():
    with pytest.raises(ScheduleError, match="the stages have none"):
        stale_fraction(schedule("stale", 2, 4), 0)


def test_a_micro_batch_of_one_of_two_chunks_counts_half():
    # Two stages, two chunks: stage 0 begins 2 (2 - 1) + 2 + 1 = 5 chunks ahead, stage 1 three.
    assert [stage.in_flight for stage in peak_memory(schedule("interleaved", 2, 4, chunks=2))] == [2.5, 1.5]


def test_a_micro_batch_is_held_until_its_weights_have_their_gradients():
    # Zero bubble draws "F0 B0 F1 B1 F2 B2 W0 ..." for the last of three stages: three are held there, 1F1B holds one.
    assert [stage.in_flight for stage in peak_memory(schedule("zero-bubble", 3, 5))] == [3, 3, 3]
    assert [stage.in_flight for stage in peak_memory(schedule("1f1b-sno", 3, 5))] == [3, 2, 1]


def test_predicted_weights_are_a_second_copy_while_a_pass_uses_them():
    # Chen et al. 2018: stage k of N predicts floor(k/2) + N - k - 1 updates ahead, which for one stage alone is none.
    assert [stage.versions for stage in peak_memory(schedule("spectrain", 3, 6))] == [2, 2, 2]
    assert [stage.versions for stage in peak_memory(schedule("spectrain", 1, 6))] == [1]
