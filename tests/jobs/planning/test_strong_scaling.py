"""Predicted step times over numbers of ranks: the planner's own, where a plan fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distconv.jobs.planning import strong_scaling
from distconv.jobs.planning.strong_scaling import (
    ScalingPoint,
    last_profiled_count,
    rank_counts,
    scaling_curves,
    select_strategies,
)
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.perfmodel.networks import machine


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    return trace(model, (4, 3, 16, 16))


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_rank_counts_are_powers_of_two_and_the_last(most: int, counts: list[int]) -> None:
    assert rank_counts(most) == counts


def test_curves_are_what_the_planner_predicts_for_each_number_of_ranks(graph: LayerGraph) -> None:
    planned = select_strategies(graph, machine(), [1, 2, 4])
    assert list(planned) == [1, 2, 4]
    found = scaling_curves(planned)
    for ranks in (1, 2, 4):
        alone = select(graph, machine(), ranks)
        assert found["planned"][ranks] == ScalingPoint(alone.time, alone.memory)
        sample = alone.uniform["sample"]
        assert sample is not None
        assert found["pure sample"][ranks] == ScalingPoint(sample.time, sample.memory)
        assert found["planned"][ranks].time <= sample.time * (1 + 1e-12)


def test_numbers_of_ranks_on_which_no_plan_fits_are_left_out(graph: LayerGraph) -> None:
    planned = select_strategies(graph, machine(), [1, 4])
    enough = min(p.memory for p in (planned[4], *filter(None, planned[4].uniform.values())))
    assert enough < planned[1].memory
    assert list(select_strategies(graph, machine(), [1, 4], (enough + planned[1].memory) / 2)) == [4]


def test_searches_have_the_limits_and_assumptions_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(strong_scaling, "select", lambda *given, **named: seen.append((given, named)))
    select_strategies("graph", "machine", [3], 5.0, "longest-path", slots=2)  # type: ignore[arg-type]
    select_strategies("graph", "machine", [4])  # type: ignore[arg-type]
    assert seen == [
        (("graph", "machine", 3), {"memory": 5.0, "method": "longest-path", "seconds": 2.0, "slots": 2}),
        (("graph", "machine", 4), {"memory": None, "method": "exact", "seconds": 2.0}),
    ]


@pytest.mark.parametrize(("measured", "end"), [((), None), ((1,), 1), ((1, 2), 2), ((1, 2, 4), 4), ((2, 4), None)])
def test_layers_are_measured_up_to_the_first_number_of_ranks_that_has_none(
    graph: LayerGraph, measured: tuple[int, ...], end: int | None
) -> None:
    """A convolution that was measured has its forward pass in the table; one without dL/dx has no backward one."""
    here = machine()
    planned = select_strategies(graph, here, [1, 2, 4])
    table = {}
    for ranks in measured:
        for name, layer in planned[ranks].prediction.layers.items():
            for op in graph.by_layer[name]:
                table[f"{local_call(op, AxisParts.from_axes(layer.parts, ranks, here.ranks_per_node)).key} forward"] = (
                    1e-3
                )
    profiled = replace(here, compute=(replace(here.compute[0], table=table),))
    assert last_profiled_count(graph, profiled, planned) == end
