"""Weight versions of each policy, read off the schedules' own lists, against the papers."""

from __future__ import annotations

import pytest

from distconv.pipeline import schedule, simulate
from distconv.pipeline.schedules.memory import peak_memory, staleness


def versions(found, stage, kind):
    return {a.microbatch: a.version for a in found.stages[stage] if a.kind == kind}


def test_hybrid_speed_up_is_that_of_the_paper():
    """4.2, with forward and backward of a stage on one rank: K + 1 ranks in place of 2K + 1."""
    stages, pipelined, rest = 3, 600, 200
    time = simulate(schedule("stale", stages, pipelined + rest, switch_after=pipelined), 1, 1).makespan
    whole = simulate(schedule("stale", stages, pipelined + rest, switch_after=0), 1, 1).makespan
    assert whole / time == pytest.approx((pipelined + rest) / (pipelined / stages + rest), rel=1e-2)


def test_pipedream_goes_back_with_the_weights_it_came_with():
    found = schedule("pipedream", 4, 12)
    for stage in range(4):
        assert versions(found, stage, "F") == versions(found, stage, "B")
        assert versions(found, stage, "F") == {m: max(0, m - (3 - stage)) for m in range(12)}
    assert [memory.versions for memory in peak_memory(found)] == [4, 3, 2, 1]


def test_vertical_sync_takes_the_version_of_the_first_stage_along():
    found = schedule("pipedream", 4, 12, vertical_sync=True)
    for stage in range(4):
        assert versions(found, stage, "F") == versions(found, stage, "B") == versions(found, 0, "F")
    assert staleness(found) == [3, 3, 3, 3]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_spectrain_predicts_as_many_updates_ahead_as_the_paper_says(stages):
    """Chen et al. 2018: s = floor(k/2) + N - k - 1 for the forward, floor(k/2) for the backward of stage k."""
    found = schedule("spectrain", stages, 14)
    for stage, actions in enumerate(found.stages):
        newest, ahead = 0, {"F": set(), "B": set()}
        for action in actions:
            newest += action.kind == "update"
            # Earlier forwards find the pipeline not yet full: fewer updates lie before their gradient's.
            if action.kind in ahead and action.microbatch >= stages:
                ahead[str(action.kind)].add(action.version - newest)
        assert ahead == {"F": {stage // 2 + stages - stage - 1}, "B": {stage // 2}}
