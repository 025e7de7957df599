"""Split points of a model for a pipeline whose stages take about equally long.

Trainers call it if the user gives no split points. It predicts times and needs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distconv.perfmodel import Device, Machine, Profile, partition, trace
from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.pipeline import SplitError

MACHINE = "localhost"
"""Machine whose predicted times balance the stages. Only their ratios matter."""


def balanced_cuts(model: torch.nn.Module, shape: Sequence[int], replicas: Sequence[int]) -> list[str]:
    """Return the layers at which to split a model into parts of about equal time per replica.

    Forward and backward times are predicted on the machine ``localhost``. Split points are between convolution and
    linear layers.

    Parameters
    ----------
    model : torch.nn.Module
    shape : sequence of int
        Shape (N, C, H, W) of a micro-batch.
    replicas : sequence of int
        Number of replicas of each part.

    Returns
    -------
    list of str
        Names of the layers that begin the second part, the third, and so on.

    Raises
    ------
    SplitError
        If there are fewer such layers than parts.
    TraceError
        If the model cannot be traced without data.
    """
    if len(replicas) == 1:
        return []
    graph = trace(model, shape)
    profile = predicted_profile(graph, Machine.load(MACHINE))
    # A stage begins with a module, and split() accepts only modules that are called once.
    modules = dict(model.named_modules())
    starts = [name for name in graph.deciding if name in modules and len(graph.by_layer[name]) == 1]
    return choose_split_points(profile, starts, replicas, type(model).__name__)


def choose_split_points(profile: Profile, starts: Sequence[str], replicas: Sequence[int], model: str) -> list[str]:
    """Select split points that divide a profile into parts of about equal time per replica.

    Source: BaPipe, 3.3.

    Parameters
    ----------
    profile : Profile
        Times of the layers.
    starts : sequence of str
        Layers that may begin a part. The first one begins the first part.
    replicas : sequence of int
        Number of replicas of each part.
    model : str
        Name of the model in errors.

    Returns
    -------
    list of str
        Names of the layers that begin the second part, the third, and so on.

    Raises
    ------
    SplitError
        If there are fewer ``starts`` than parts.
    """
    if len(starts) < len(replicas):
        raise SplitError(
            f"{model}: has {len(starts)} layers to split at, too few for {len(replicas)} parts. Use fewer stages."
        )
    # Between two starts nothing can be split, so the layers from one to the next count as one block.
    blocks = join_layers(profile, starts[1:])
    times = [layer.time_s for layer in blocks.layers]
    devices = [Device(f"part {index}", times=[t / count for t in times]) for index, count in enumerate(replicas)]
    stages = partition(blocks, devices, Machine.load(MACHINE).node.bandwidth_bytes_per_s, "bapipe")
    return [blocks.layers[cut].name for cut in stages.cuts]
