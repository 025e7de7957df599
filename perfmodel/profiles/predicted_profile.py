"""A layer profile without a run: the times are what a machine's table or roofline says of a traced network.

>>> import torch
>>> from distconv.perfmodel.machine.machine import Machine
>>> from distconv.perfmodel.graph.tracing import trace
>>> graph = trace(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), (2, 4))
>>> profile = predicted_profile(graph, Machine.load("localhost"))
>>> [(layer.name, layer.activation_bytes, layer.parameter_bytes) for layer in profile.layers]
[('0', 64.0, 160), ('1', 64.0, 0)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import resolve
from distconv.perfmodel.cost.evaluation import Assignment, Model
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.cost.step_memory import block_bytes
from distconv.perfmodel.graph.graph import INPUT, GraphConstant, LayerGraph, Operation
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.plan import Plan


def predicted_profile(
    graph: LayerGraph, machine: Machine, plan: Plan | Assignment | None = None, ranks: int = 1
) -> Profile:
    """Each operation of ``graph`` on one rank of ``machine`` as a layer, for the mini-batch that was traced.

    On ``ranks`` ranks under ``plan`` layers have their halos, redistributions of inputs and sums of gradients, the
    latter not hidden, and sizes are those of the fullest rank. Views cost nothing and are no layers. A parameter counts
    where it is used first.

    Raises
    ------
    PlanError
        If the plan does not fit the graph or ``ranks``.
    """
    model = Model.of(graph, machine, ranks, Settings())
    strategy = resolve(graph, {"*": {}} if plan is None else plan, ranks)
    grids = {name: model.parts(candidate) for name, candidate in strategy.items()}
    layers: list[Layer] = []
    edges: dict[tuple[str, str], None] = {}
    place: dict[int, tuple[str, ...]] = {INPUT: ()}
    used: set[GraphConstant] = set()
    for op in graph.operations:
        read = tuple(dict.fromkeys(name for value in op.inputs for name in place[value.producer]))
        if op.view:
            place[op.index] = read
            continue
        layers.append(_layer(op, model, grids, used))
        place[op.index] = (op.name,)
        edges |= {(name, op.name): None for name in read}
    return Profile(layers, list(edges))


def is_estimated(graph: LayerGraph, machine: Machine, plan: Plan | Assignment | None = None, ranks: int = 1) -> bool:
    """Return :meth:`Model.is_estimated` of a plan; the arguments are those of :func:`predicted_profile`."""
    strategy = resolve(graph, {"*": {}} if plan is None else plan, ranks)
    return Model.of(graph, machine, ranks, Settings()).is_estimated(strategy)


def scaled(profile: Profile, factor: float) -> Profile:
    """``profile`` for ``factor`` times as many samples, if times and outputs are in proportion to them."""
    layers = [
        dataclasses.replace(
            layer,
            forward_s=factor * layer.forward_s,
            backward_s=factor * layer.backward_s,
            activation_bytes=factor * layer.activation_bytes,
        )
        for layer in profile.layers
    ]
    return Profile(layers, profile.edges)


def _layer(op: Operation, model: Model, grids: Mapping[str, AxisParts], used: set[GraphConstant]) -> Layer:
    costs, parts = model.costs, grids[op.layer]
    cost = costs.operation(op, parts)
    forward, backward = cost.forward, cost.backward + cost.bpa
    for value in op.inputs:
        source = grids[model.graph.layer_of(value)]
        forward += costs.shuffle(value, source, parts)
        backward += costs.shuffle(value, parts, source) if value.requires_grad else 0.0
    new = [
        math.prod(shape) * constant.itemsize
        for shape, constant in zip(local_call(op, parts).constants, op.constants, strict=True)
        if constant.trained and constant not in used
    ]
    used.update(op.parameters)
    return Layer(op.name, forward, backward, sum(block_bytes(value, parts) for value in op.outputs), sum(new))
