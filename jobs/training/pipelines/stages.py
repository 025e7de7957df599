"""Where a model is cut into the stages of a pipeline: at layers, so that all stages take about equally long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distconv.perfmodel import Device, LayerGraph, Machine, Profile, partition, trace
from distconv.perfmodel.profiles.joined_layers import joined
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.pipeline import SplitError

MACHINE = "localhost"
"""Its times balance the stages: only their ratios count."""


def balanced_cuts(model: torch.nn.Module, shape: Sequence[int], replicas: Sequence[int]) -> list[str]:
    """The layers that begin the second part, the third, ...: ``len(replicas)`` parts of about equal time per replica.

    Times are predicted for a micro-batch of ``shape`` (N, C, H, W), forward and backward, on the machine ``localhost``;
    cuts are between convolution and linear layers.

    Raises
    ------
    SplitError
        If there are fewer such layers than parts.
    TraceError
        If the model does not run without data.
    """
    if len(replicas) == 1:
        return []
    graph = trace(model, shape)
    profile = predicted_profile(graph, Machine.load(MACHINE))
    return cuts_of(profile, list(_starts(model, graph)), replicas, type(model).__name__)


def cuts_of(profile: Profile, starts: Sequence[str], replicas: Sequence[int], model: str) -> list[str]:
    """Those of ``starts`` that cut a ``profile`` into ``len(replicas)`` parts of about equal time per replica.

    The cuts are those of BaPipe's partition (3.3); ``model`` names it in errors.

    Raises
    ------
    SplitError
        If there are fewer ``starts`` than parts.
    """
    if len(starts) < len(replicas):
        raise SplitError(
            f"{model} has {len(starts)} layers to cut at, too few for {len(replicas)} parts; use fewer stages"
        )
    blocks = joined(profile, starts[1:])
    times = [layer.time_s for layer in blocks.layers]
    devices = [Device(f"part {index}", times=[t / count for t in times]) for index, count in enumerate(replicas)]
    stages = partition(blocks, devices, Machine.load(MACHINE).node.bandwidth_bytes_per_s, "bapipe")
    return [blocks.layers[cut].name for cut in stages.cuts]


def _starts(model: torch.nn.Module, graph: LayerGraph) -> Iterator[str]:
    """Layers that are modules and called once."""
    modules = dict(model.named_modules())
    return (name for name in graph.deciding if name in modules and len(graph.by_layer[name]) == 1)
