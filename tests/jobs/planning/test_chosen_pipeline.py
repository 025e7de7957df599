"""From a choice to a pipeline plan and a timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from distconv.jobs.planning.chosen_pipeline import pipeline_plan, timeline
from distconv.perfmodel import Machine, explore, trace
from distconv.perfmodel.exploration.choices import Choice
from distconv.pipeline import possible_cuts
from distconv.plan import Plan


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def choices(ranks: int, *schedules: str) -> list[Choice]:
    found = explore(
        lambda samples: trace(network(), (samples, 3, 16, 16)),
        Machine.load("localhost"),
        ranks,
        4,
        schedules=schedules,
        joint=True,
        cuts=possible_cuts(network()),
    )
    return list(found.table)


def test_every_choice_of_a_search_is_a_plan_for_as_many_ranks_that_its_model_can_be_cut_by() -> None:
    for choice in choices(4, "dp", "gpipe", "1f1b-so", "pipedream"):
        plan = pipeline_plan(choice, network(), "network", 4)
        assert plan.ranks == 4 and plan.batch == 4 and plan.model == "network"
        assert len(plan.cuts) == len(choice.memory) - 1
        assert plan.replicas == (choice.replicas,) * len(choice.memory)
        assert plan.microbatches == choice.microbatches
        assert plan.schedule == ("gpipe" if choice.schedule == "dp" else choice.schedule)


def test_a_stage_has_the_plan_of_its_own_layers_and_one_without_layers_the_grid_before() -> None:
    choice = explored_at(["4"])[0]
    assert choice.plan is not None
    plan = pipeline_plan(choice, network(), "network", 4)
    assert isinstance(plan.plans[0], Plan) and set(plan.plans[0].layers) == {"0", "3"}
    assert plan.plans[1] == choice.plan.layers["3"]
    both = pipeline_plan(explored_at(["3"])[0], network(), "network", 4).plans
    assert [set(each.layers) for each in both if isinstance(each, Plan)] == [{"0"}, {"3"}]


def explored_at(cuts: list[str]) -> list[Choice]:
    found = explore(
        lambda samples: trace(network(), (samples, 3, 16, 16)),
        Machine.load("localhost"),
        4,
        4,
        schedules="gpipe",
        joint=True,
        cuts=cuts,
    )
    return [choice for choice in found.table if choice.width == 2]


@pytest.mark.parametrize("name", ["dp", "gpipe", "1f1b-sno"])
def test_the_timeline_of_a_choice_takes_about_its_time(name: str) -> None:
    """The closed forms of 1F1B charge whole chains; they are exact for one stage and for GPipe."""
    for choice in choices(2, name):
        if choice.width > 1 or choice.replicas > 1:
            continue
        drawn = timeline(choice).makespan
        assert drawn <= choice.time * (1 + 1e-9) if name == "1f1b-sno" else drawn == pytest.approx(choice.time)


def test_the_timeline_of_an_endless_schedule_has_several_mini_batches() -> None:
    choice = next(each for each in choices(2, "pipedream") if each.width == 1)
    drawn = timeline(choice)
    assert drawn.schedule.microbatches == 8
    assert drawn.makespan == pytest.approx(8 * choice.time, rel=0.5)


def test_the_timeline_has_the_costs_and_the_replicas_of_the_choice() -> None:
    choice = next(each for each in choices(4, "gpipe") if each.replicas == 2 and len(each.memory) == 2)
    costs = replace(choice.costs, forward=(1.0, 2.0), backward=(3.0, 4.0), transfer=(0.5,), update=(0.25, 0.75))
    drawn = timeline(replace(choice, costs=costs, schedule="dp", microbatches=2))
    assert (drawn.replicas, drawn.schedule.name) == ((2, 2), "dp")
    # Each replica has one micro-batch: forward, transfer, forward and backward, transfer, backward, update.
    assert drawn.makespan == 1 + 0.5 + 2 + 4 + 0.5 + 3 + 0.25
