"""Where a model is cut into the stages of a pipeline: at layers, so that all stages take about equally long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distconv.perfmodel import Device, LayerGraph, Machine, partition, trace
from distconv.perfmodel.profiles.joined_layers import joined
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
    profile = joined(predicted_profile(graph, machine), starts[1:])
    times = [layer.time_s for layer in profile.layers]
    devices = [Device(f"part {index}", times=[t / count for t in times]) for index, count in enumerate(replicas)]
    found = partition(profile, devices, machine.node.bandwidth_bytes_per_s, "bapipe")
    return [profile.layers[cut].name for cut in found.cuts]


def _starts(model: torch.nn.Module, graph: LayerGraph) -> Iterator[str]:
    """Layers that are modules and called once."""
    modules = dict(model.named_modules())
    return (name for name in graph.deciding if name in modules and len(graph.by_layer[name]) == 1)
