"""Candidates of each layer, and plans that do not fit."""

from __future__ import annotations

import pytest
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from tests.perfmodel.networks import machine


def test_layers_that_a_plan_leaves_out_stay_on_the_grid_of_their_input():
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    left_out = evaluate(graph, {"c1": {"n": 2}}, machine(), 2)
    assert all(layer.parts == {"n": 2} for layer in left_out.layers.values())
    assert left_out.time == evaluate(graph, dc.Plan({"*": {"n": 2}}), machine(), 2).time


@pytest.mark.parametrize(
    ("plan", "ranks", "text"),
    [
        ({"nothing*": {"n": 2}}, 2, "'nothing\\*' matches no layer of LeNet5"),
        ({"*": {"x": 2}}, 2, "unknown axis 'x'"),
        ({"*": {"n": 3}}, 4, "3 parts, which do not divide the 4 ranks"),
        ({"*": {"d": 2}}, 2, "split along d"),
        ({"*": {"n": 0}}, 2, "positive whole number"),
        ({"c3": {"n": 2}}, 2, "'c1', where the input arrives"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(plan, ranks, text):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match=text) as error:
        evaluate(graph, plan, machine(), ranks)
    assert "\n" not in str(error.value)


def test_a_plan_for_other_ranks_or_groups_that_do_not_divide_is_refused():
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match="made for 8 ranks, not for 4"):
        evaluate(graph, dc.Plan({"*": {"n": 4}}, ranks=8), machine(), 4)
    grouped = trace(nn.Sequential(nn.Conv2d(6, 6, 3, groups=3)), (2, 6, 8, 8))
    with pytest.raises(dc.PlanError, match="groups=3 do not divide over c=2"):
        evaluate(grouped, {"*": {"c": 2}}, machine(), 2)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_ranks_must_be_a_positive_number(ranks):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match="ranks="):
        candidates(graph, ranks)
