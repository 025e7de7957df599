"""Which ranks run which stage."""

from __future__ import annotations

import pytest
from torch import nn

from distconv.errors import GridError, PlanError
from distconv.pipeline.runtime.placement import StagePlacement, StagePosition, boundary_grids
from distconv.plan import Plan


def test_ranks_go_stage_by_stage_and_replica_by_replica():
    placement = StagePlacement(7, (2, 1), [{"h": 2}, {"n": 3}])
    assert placement.positions == [
        *(StagePosition(0, replica, member) for replica in range(2) for member in range(2)),
        *(StagePosition(1, 0, member) for member in range(3)),
    ]


def test_micro_batches_go_to_replicas_in_turn():
    placement = StagePlacement(7, (2, 1), [{"h": 2}, {"n": 3}])
    assert [placement.ranks(0, m) for m in range(3)] == [range(2), range(2, 4), range(2)]
    assert [placement.ranks(1, m) for m in range(2)] == [range(4, 7)] * 2


def test_a_stage_without_a_grid_has_one_rank():
    assert StagePlacement(3, (1, 1, 1), [None, {}, {"h": 1}]).positions == [
        StagePosition(stage, 0, 0) for stage in range(3)
    ]


@pytest.mark.parametrize(
    ("ranks", "replicas", "grids", "words"),
    [
        (3, (1, 1), None, r"2 stages need 1 \+ 1 = 2 ranks, but the communicator has 3"),
        (4, (2, 1), [{"h": 2}, None], r"2 x \(h=2\) \+ 1 = 5 ranks, but the communicator has 4"),
        (2, (1, 1), [None, {"q": 1}], "unknown axis 'q'"),
        (2, (1, 1), [None, {"h": 0}], "h=0"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, replicas, grids, words):
    with pytest.raises(GridError, match=words):
        StagePlacement(ranks, replicas, grids)


def layers():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))


def test_tensors_enter_a_stage_with_a_plan_on_the_grid_of_its_first_layer():
    plans = [Plan({"*": {"h": 2}, "0": {"n": 2}}), {"w": 3}, None, Plan({"2": {"c": 2}}, 4)]
    found = boundary_grids(plans, [layers() for _ in plans], 4)
    assert found == [{"n": 2, "r": 1}, {"w": 3}, None, {"c": 2, "r": 2}]


def test_a_plan_takes_as_many_ranks_as_all_its_layers_need():
    assert boundary_grids([Plan({"0": {"n": 2}, "2": {"h": 3}})], [layers()], 1) == [{"n": 2, "r": 3}]


def test_a_plan_suits_all_chunks_of_its_stage():
    chunks = [layers(), layers(), nn.Sequential(nn.Conv2d(4, 4, 3)), layers()]
    with pytest.raises(PlanError, match=r"stage 0: plan: '2' matches no layer of Sequential"):
        boundary_grids([Plan({"2": {"h": 2}}), None], chunks, 2)
    assert boundary_grids([Plan({"*": {"h": 2}}), None], chunks, 2) == [{"h": 2, "r": 1}, None]


@pytest.mark.parametrize(
    ("plans", "error", "words"),
    [
        ([None], GridError, "1 plans for 2 stages"),
        ([None, "h=2"], PlanError, "stage 1: 'h=2' is neither a Plan, nor a grid such as"),
        ([Plan({"fc": {"n": 2}}), None], PlanError, "stage 0: plan: 'fc' matches no layer"),
        ([None, Plan({"*": {"d": 2}})], PlanError, r"stage 1: plan: '0' \(Conv2d\) is split along d"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plans, error, words):
    with pytest.raises(error, match=words):
        boundary_grids(plans, [layers(), layers()], 2)
