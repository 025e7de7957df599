"""A layer profile without a run: the times are what a machine's table or roofline says of a traced network.

>>> import torch
>>> from distconv.perfmodel.machine import Machine
>>> from distconv.perfmodel.tracing import trace
>>> graph = trace(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), (2, 4))
>>> profile = predicted_profile(graph, Machine.load("localhost"))
>>> [(layer.name, layer.activation_bytes, layer.parameter_bytes) for layer in profile.layers]
[('0', 64, 160), ('1', 64, 0)]
"""

from __future__ import annotations

import dataclasses

from distconv.perfmodel.costs import Costs
from distconv.perfmodel.geometry import Parts
from distconv.perfmodel.graph import INPUT, Constant, LayerGraph, Operation
from distconv.perfmodel.layer_profile import Layer, Profile
from distconv.perfmodel.machine import Machine
from distconv.perfmodel.settings import Settings
from distconv.perfmodel.work import PHASES, local_call


def predicted_profile(graph: LayerGraph, machine: Machine) -> Profile:
    """Each operation of ``graph`` on one rank of ``machine`` as a layer, for the mini-batch that was traced.

    Views cost nothing and are no layers. A parameter counts where it is used first.
    """
    costs = Costs(machine, 1, Settings())
    layers: list[Layer] = []
    edges: dict[tuple[str, str], None] = {}
    place: dict[int, tuple[str, ...]] = {INPUT: ()}
    used: set[Constant] = set()
    for op in graph.operations:
        read = tuple(dict.fromkeys(name for value in op.inputs for name in place[value.producer]))
        if op.view:
            place[op.index] = read
            continue
        layers.append(_layer(op, costs, used))
        place[op.index] = (op.name,)
        edges |= {(name, op.name): None for name in read}
    return Profile(layers, list(edges))


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


def _layer(op: Operation, costs: Costs, used: set[Constant]) -> Layer:
    call = local_call(op, Parts.of({}, 1, 1))
    forward, *backward = (costs.compute(call, phase) for phase in PHASES)
    new = [constant for constant in op.parameters if constant not in used]
    used.update(new)
    return Layer(
        op.name,
        forward,
        sum(backward),
        sum(value.elements * value.itemsize for value in op.outputs),
        sum(constant.elements * constant.itemsize for constant in new),
    )
