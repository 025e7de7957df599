"""What the layers of a sparse network compute on a cloud, counted, and where that cuts it into equal stages.

Work is counted in pairs of sites that meet, not in voxels, in one pass without gradients; the same cloud gives the same
cuts on every rank and in every run, which measured times would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distconv.jobs.training.pipeline_stages import MACHINE, cuts_of
from distconv.layers.sparse import SparseConv, SparseTensor
from distconv.perfmodel import Layer, Machine, Profile

BACKWARD = 2.0
"""Times as long as forward: the gradient of the input, and of the weights."""


def balanced_cuts(model: nn.Module, x: SparseTensor, replicas: Sequence[int]) -> list[str]:
    """The layers that begin the second part, the third, ...: ``len(replicas)`` parts of about equal time per replica.

    ``x`` is a micro-batch; the cuts are between convolution and linear layers.

    Raises
    ------
    SplitError
        If there are fewer such layers than parts.
    """
    if len(replicas) == 1:
        return []
    profile = counted_profile(model, x)
    modules = dict(model.named_modules())
    starts = [each.name for each in profile.layers if isinstance(modules.get(each.name), (SparseConv, nn.Linear))]
    return cuts_of(profile, starts, replicas, type(model).__name__)


@torch.no_grad()
def counted_profile(model: nn.Module, x: SparseTensor) -> Profile:
    """Each call of a layer of ``model`` on ``x``, with its roofline time on the machine ``localhost``.

    A layer is a module without children; ``name#2`` is its second call. The model is in evaluation meanwhile.
    """
    roofline = Machine.load(MACHINE).computing(1).roofline
    layers, calls, training = list[Layer](), Counter[str](), model.training

    def note(name: str, module: nn.Module, given: Any, made: Any) -> None:
        calls[name] += 1
        flops, moved = _work(module, given, made)
        forward = roofline.time(flops, moved, _numbers(made))
        label = name if calls[name] == 1 else f"{name}#{calls[name]}"
        held = sum(p.nbytes for p in module.parameters()) if calls[name] == 1 else 0
        layers.append(Layer(label, forward, BACKWARD * forward, made.nbytes, held))

    hooks = [
        module.register_forward_hook(lambda module, args, made, name=name: note(name, module, args[0], made))
        for name, module in model.named_modules()
        if not any(True for _ in module.children())
    ]
    try:
        model.eval()(x)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return Profile(layers)


def _work(module: nn.Module, given: Any, made: Any) -> tuple[float, float]:
    """Floating-point operations, and bytes that are read and written."""
    size = _features(made).element_size()
    weights = sum(p.nbytes for p in module.parameters())
    if isinstance(module, SparseConv):
        pairs, channels = module.pairs(given), (module.in_channels, module.out_channels)
        return 2.0 * pairs * channels[0] * channels[1], size * pairs * sum(channels) + weights
    flops = 2.0 * _features(given).shape[0] * module.weight.numel() if isinstance(module, nn.Linear) else 0.0
    return flops, size * (_numbers(given) + _numbers(made)) + weights


def _features(x: SparseTensor | torch.Tensor) -> torch.Tensor:
    return x.features if isinstance(x, SparseTensor) else x


def _numbers(x: SparseTensor | torch.Tensor) -> int:
    return _features(x).numel()
