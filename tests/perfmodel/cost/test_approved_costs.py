"""Costs of all kinds of operations on many grids, as approved: parts of each time, memory, and whole predictions."""

from __future__ import annotations

from dataclasses import astuple, fields

import pytest

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.cost.operation_cost import OperationCost, OperationCosts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.tracing import trace
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import GRIDS, NETWORKS, digits, uneven_machine

RANKS = 4
ASSUMPTIONS = {
    "default": {},
    "keep-all": {"memory_model": "keep-all", "optimizer_slots": 2},
    "sharded": {"shard_optimizer": True, "workspace": 1e5, "overlap": False},
    "spatial": {"batch_norm": "spatial"},
    "local": {"batch_norm": "local", "optimizer_slots": 0},
    "weights": {"shard_weights": True, "optimizer_slots": 2},
}


def graph_of(name: str):
    network, shape = NETWORKS[name]
    return trace(network(), shape)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_costs_of_operations(name: str, overlap: bool) -> None:
    graph, costs = graph_of(name), OperationCosts(uneven_machine(overlap=overlap), RANKS, Settings())
    # Without the last field, gathers of sharded weights.
    lines = ["seconds: " + " ".join(field.name for field in fields(OperationCost)[:-1])]
    for grid in GRIDS[name]:
        parts = AxisParts.from_axes(grid, RANKS, 2)
        for op in graph.operations:
            call = local_call(op, parts)
            numbers = " ".join(map(digits, astuple(costs.operation(op, parts))[:-1]))
            lines.append(f"{parts.describe()} {op.name} {call.key}: {numbers}")
    assert_approved(f"perfmodel/costs/{name}-{'overlap' if overlap else 'in-turn'}", "\n".join(lines))


@pytest.mark.parametrize(
    ("name", "assumed"), [*(("flat", each) for each in ASSUMPTIONS), ("deep", "default"), ("deep", "keep-all")]
)
def test_predictions_of_plans(name: str, assumed: str) -> None:
    graph, lines = graph_of(name), []
    grids = GRIDS[name]
    plans = [{"*": grid} for grid in grids]
    # Each layer another grid, so that results are redistributed.
    plans += [{layer: grids[(at + k) % len(grids)] for k, layer in enumerate(graph.deciding)} for at in range(2)]
    for plan in plans:
        found = evaluate(graph, plan, uneven_machine(), RANKS, **ASSUMPTIONS[assumed])
        totals = (found.time, found.memory, found.hidden, found.lasting)
        lines.append(f"{plan}: {' '.join(map(digits, totals))} {found.unknown}")
        for layer, each in found.layers.items():
            times = astuple(each)[1:] if "shard_weights" in ASSUMPTIONS[assumed] else astuple(each)[1:-1]
            lines.append(f"    {layer} {each.parts} {' '.join(map(digits, times))}")
    assert_approved(f"perfmodel/predictions/{name}-{assumed}", "\n".join(lines))


@pytest.mark.parametrize("name", NETWORKS)
def test_candidates_of_layers(name: str) -> None:
    found = {ranks: candidates(graph_of(name), ranks) for ranks in (1, 2, 3, 4, 8)}
    lines = [f"{ranks} {layer}: {options}" for ranks, layers in found.items() for layer, options in layers.items()]
    assert_approved(f"perfmodel/candidates/{name}", "\n".join(lines))
