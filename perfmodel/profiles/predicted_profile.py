"""Layer profile predicted from a traced network: times from a machine's table or roofline.

:func:`.explore` and the command line use it where no profile was measured.

Examples
--------
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
from distconv.perfmodel.cost.evaluation import Assignment, StepModel
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.cost.step_memory import block_bytes
from distconv.perfmodel.graph.graph import INPUT, GraphConstant, LayerGraph, Operation
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.plan import Plan


def predicted_profile(
    graph: LayerGraph, machine: Machine, plan: Plan | Assignment | None = None, ranks: int = 1
) -> Profile:
    """Return a layer profile of a traced network, with times predicted for a machine.

    Each operation is a layer, for the mini-batch that was traced. Views are omitted. A parameter counts at its first
    use. With a plan, layers include their halo exchanges, the redistribution of their inputs and their gradient
    all-reduce, which is not overlapped.

    Parameters
    ----------
    graph : LayerGraph
        Network, from :func:`trace`.
    machine : Machine
        Hardware model.
    plan : Plan or mapping, optional
        Distribution of the layers over ``ranks``. Default: one rank.
    ranks : int
        Number of ranks.

    Returns
    -------
    Profile
        Seconds and bytes on the rank with the largest blocks.

    Raises
    ------
    PlanError
        If the plan does not fit the graph or ``ranks``.
    """
    model = StepModel.cached(graph, machine, ranks, Settings())
    strategy = resolve(graph, {"*": {}} if plan is None else plan, ranks)
    grids = {name: model.parts(candidate) for name, candidate in strategy.items()}
    layers: list[Layer] = []
    edges: dict[tuple[str, str], None] = {}
    # Layers that made the result of each operation; a view has those of its inputs.
    place: dict[int, tuple[str, ...]] = {INPUT: ()}
    # Constants compare by value: a parameter is recognized by its name.
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
    """Return True if the machine has measured times, but not of all layers with weights under the plan.

    Parameters
    ----------
    graph, machine, plan, ranks
        As in :func:`predicted_profile`.
    """
    strategy = resolve(graph, {"*": {}} if plan is None else plan, ranks)
    return StepModel.cached(graph, machine, ranks, Settings()).is_estimated(strategy)


def scale_profile(profile: Profile, factor: float) -> Profile:
    """Return the profile for ``factor`` times as many samples, with times and outputs in proportion.

    Parameters
    ----------
    profile : Profile
    factor : float
        Ratio of the numbers of samples.

    Returns
    -------
    Profile
        With unchanged parameters.
    """
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


def _layer(op: Operation, model: StepModel, grids: Mapping[str, AxisParts], used: set[GraphConstant]) -> Layer:
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
