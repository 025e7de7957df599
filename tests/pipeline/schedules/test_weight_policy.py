"""Weight versions of each policy, read off the schedules' own lists, against the papers."""

from __future__ import annotations

import pytest

from distconv.pipeline import schedule, simulate
from distconv.pipeline.schedules.memory import peak_memory, staleness


def versions(found, stage, kind):
    return {a.microbatch: a.version for a in found.stages[stage] if a.kind == kind}


def test_stale_backwards_use_the_newest_weights():
    found = schedule("stale", 3, 9)
    assert versions(found, 0, "B") == {m: m for m in range(9)}
    assert versions(found, 0, "F") == {m: max(0, m - 4) for m in range(9)}


def test_after_the_switch_no_weights_are_stale():
    found = schedule("stale", 3, 12, switch_after=8)
    for stage in range(3):
        forward = versions(found, stage, "F")
        assert [forward[m] for m in range(8, 12)] == [8, 9, 10, 11]
        assert [a.kind for a in found.stages[stage]].count("switch") == 1


def test_hybrid_speed_up_is_that_of_the_paper():
    """4.2, with forward and backward of a stage on one rank: K + 1 ranks in place of 2K + 1."""
    stages, pipelined, rest = 3, 600, 200
    time = simulate(schedule("stale", stages, pipelined + rest, switch_after=pipelined), 1, 1).makespan
    whole = simulate(schedule("stale", stages, pipelined + rest, switch_after=0), 1, 1).makespan
    assert whole / time == pytest.approx((pipelined + rest) / (pipelined / stages + rest), rel=1e-2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b-so", "interleaved", "zero-bubble"])
def test_a_synchronous_schedule_has_one_version_and_one_update_per_stage(name):
    for actions in schedule(name, 3, 5).stages:
        assert {a.version for a in actions if a.kind in ("F", "B", "W")} == {0}
        assert [(a.kind, a.version) for a in actions][-1] == ("update", 1)
        assert sum(a.kind == "update" for a in actions) == 1


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


def test_a_stash_comes_right_before_the_update_that_replaces_it():
    (actions,) = schedule("pipedream", 2, 4).stages[:1]
    shown = [(str(a.kind), a.microbatch, a.version) for a in actions if a.kind in ("B", "stash", "update")]
    assert shown == [
        ("B", 0, 0),
        ("stash", 1, 0),
        ("update", 0, 1),
        ("B", 1, 0),
        ("stash", 2, 1),
        ("update", 1, 2),
        ("B", 2, 1),
        ("stash", 3, 2),
        ("update", 2, 3),
        ("B", 3, 2),
        ("update", 3, 4),
    ]


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


def test_replicas_without_a_mini_batch_take_part_in_the_last_update():
    # Four mini-batches over three replicas: the first has two, so that all three update twice.
    found = schedule("pipedream", 2, 4, replicas=[3, 1])
    updates = [[(a.microbatch, a.version) for a in actions if a.kind == "update"] for actions in found.stages]
    assert updates == [[(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)], [(0, 1), (1, 2), (2, 3), (3, 4)]]
