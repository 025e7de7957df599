"""Recorded graphs of networks with most kinds of operations, as approved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distconv.perfmodel.graph.graph import LayerGraph, Value
from distconv.perfmodel.graph.tracing import trace
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import NETWORKS


def described(graph: LayerGraph) -> Iterator[str]:
    yield f"{graph.model} {graph.input_shapes} from {graph.input_layer}: {graph.deciding}, {graph.batch} samples"
    for op in graph.operations:
        flags = [flag for flag in ("decides", "in_place", "view") if getattr(op, flag)]
        yield f"{op.index} {op.name}: {op.kind} in {op.layer} {' '.join(flags)} groups {op.groups} {op.window}"
        for what in ("inputs", "outputs", "saved"):
            yield f"    {what}: {', '.join(value(each) for each in getattr(op, what))}"
        yield f"    constants: {', '.join(f'{each.name} {each.shape} {each.trained}' for each in op.constants)}"


def value(each: Value) -> str:
    gradient = " with gradient" if each.requires_grad else ""
    return f"{tuple(each.shape)} {each.dtype}{gradient}"


@pytest.mark.parametrize("name", NETWORKS)
def test_graphs(name: str) -> None:
    network, shape = NETWORKS[name]
    assert_approved(f"perfmodel/graphs/{name}", "\n".join(described(trace(network(), shape))))
