"""Memory and staleness, read off the schedules' own lists, against the papers."""

from __future__ import annotations

import pytest

from distconv.pipeline import ScheduleError, schedule
from distconv.pipeline.schedules.memory import peak_memory, stale_fraction, staleness


@pytest.mark.parametrize("pairs", range(1, 10))
def test_stale_weights_are_those_of_section_4_1(pairs):
    """K register pairs, stages 1..K+1: stage i is 2(K - i + 1) cycles late, as many as it keeps activations."""
    found = schedule("stale", pairs + 1, 5 * pairs + 5)
    late = [2 * (pairs - i + 1) for i in range(1, pairs + 2)]
    assert staleness(found) == late
    memory = peak_memory(found)
    assert [stage.in_flight - 1 for stage in memory] == late
    assert {stage.versions for stage in memory} == {1}
    weights = [3.0 + stage for stage in range(pairs + 1)]
    assert stale_fraction(found, weights) == pytest.approx(sum(weights[:-1]) / sum(weights))


def test_no_weights_at_all_have_no_stale_fraction():
    with pytest.raises(ScheduleError, match="the stages have none"):
        stale_fraction(schedule("stale", 2, 4), 0)


def test_a_micro_batch_of_one_of_two_chunks_counts_half():
    # Two stages, two chunks: stage 0 begins 2 (2 - 1) + 2 + 1 = 5 chunks ahead, stage 1 three.
    assert [stage.in_flight for stage in peak_memory(schedule("interleaved", 2, 4, chunks=2))] == [2.5, 1.5]


def test_predicted_weights_are_a_second_copy_while_a_pass_uses_them():
    # Chen et al. 2018: stage k of N predicts floor(k/2) + N - k - 1 updates ahead, which for one stage alone is none.
    assert [stage.versions for stage in peak_memory(schedule("spectrain", 3, 6))] == [2, 2, 2]
    assert [stage.versions for stage in peak_memory(schedule("spectrain", 1, 6))] == [1]
