"""Where a model is cut into the stages of a pipeline: at layers, so that all stages take about equally long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from distconv.perfmodel import Device, Layer, LayerGraph, Machine, Profile, partition, trace
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.pipeline import SplitError

MACHINE = "localhost"
"""Its times balance the stages: only their ratios count."""


def balanced_cuts(model: torch.nn.Module, shape: Sequence[int], replicas: Sequence[int]) -> list[str]:
    """The layers that begin the second part, the third, ...: ``len(replicas)`` parts of about equal time per replica.

    Times are predicted for a micro-batch of ``shape`` (N, C, H, W), forward and backward, on the machine ``localhost``;
    the cuts are those of BaPipe's partition (3.3) between convolution and linear layers.

    Raises
    ------
    SplitError
        If there are fewer such layers than parts.
    TraceError
        If the model does not run without data.
    """
    if len(replicas) == 1:
        return []
    machine, graph = Machine.load(MACHINE), trace(model, shape)
    starts = list(_starts(model, graph))
    if len(starts) < len(replicas):
        raise SplitError(
            f"{type(model).__name__} has {len(starts)} layers to cut at, too few for {len(replicas)} parts; use fewer "
            "stages"
        )
    profile = _blocks(predicted_profile(graph, machine), starts)
    times = [layer.time_s for layer in profile.layers]
    devices = [Device(f"part {index}", times=[t / count for t in times]) for index, count in enumerate(replicas)]
    found = partition(profile, devices, machine.node.bandwidth_bytes_per_s, "bapipe")
    return [profile.layers[cut].name for cut in found.cuts]


def _starts(model: torch.nn.Module, graph: LayerGraph) -> Iterator[tuple[str, str]]:
    """Layers that are modules and called once, with the operations that they are."""
    modules = dict(model.named_modules())
    for op in graph.operations:
        if op.decides and op.layer in modules and len(graph.by_layer[op.layer]) == 1:
            yield op.layer, op.name


def _blocks(profile: Profile, starts: Sequence[tuple[str, str]]) -> Profile:
    """Each layer together with what follows up to the next one, and the first with what is before it."""
    place = {layer.name: index for index, layer in enumerate(profile.layers)}
    edges = [0, *(place[operation] for _, operation in starts[1:]), len(place)]
    crossing = profile.crossing_bytes
    return Profile(
        [
            Layer(
                name,
                sum(layer.forward_s for layer in profile.layers[first:end]),
                sum(layer.backward_s for layer in profile.layers[first:end]),
                crossing[end],
                sum(layer.parameter_bytes for layer in profile.layers[first:end]),
            )
            for (name, _), (first, end) in zip(starts, pairwise(edges), strict=True)
        ]
    )
