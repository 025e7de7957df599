"""Draws normalizations and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function, on_module, seeded
from distconv.jobs.verification.differential.worlds import World

_BATCH_NORMS: dict[int, Callable[..., nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORMS: dict[int, Callable[..., nn.Module]] = {
    1: nn.InstanceNorm1d,
    2: nn.InstanceNorm2d,
    3: nn.InstanceNorm3d,
}


def _drawn(draw: Draw, build: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weights are neither one nor zero."""
    module = seeded(draw, build)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def batch_norm(draw: Draw) -> Program:
    """Batch norm in training or evaluation, two steps so that running statistics matter."""
    count = draw.number(1, 3)
    channels = draw.number(1, 4)
    options: dict[str, Any] = {
        "affine": draw.chance(0.7),
        "momentum": draw.pick(0.1, 0.3, None),
        "track_running_stats": draw.chance(0.8),
    }
    module = _drawn(draw, lambda: _BATCH_NORMS[count](channels, **options))
    module.train(draw.chance(0.7))
    x = image(draw, channels, draw.extents(count)) * 3 + 1
    first = draw.tensor(*x.shape)
    parallel = draw.chance(0.5)

    def run(world: World) -> None:
        own = world.model(module, parallel)
        own(world.put(first, grad=False))
        given = world.put(x)
        world.differentiate(own(given), x=given)
        world.state(own)

    text = f"x{tuple(x.shape)} {options} {'training' if module.training else 'evaluation'}"
    return Program("batch norm", text, run, count)


def group_norm(draw: Draw) -> Program:
    """Group norm, one group (all channels) and groups of one channel included."""
    count = draw.number(1, 3)
    groups = draw.number(1, 4)
    channels = groups * draw.number(1, 3)
    affine = draw.chance(0.7)
    module = _drawn(draw, lambda: nn.GroupNorm(groups, channels, affine=affine))
    x = image(draw, channels, draw.extents(count)) * 2 + 1
    return on_module(draw, "group norm", f"{groups} groups affine={affine}", module, x)


def instance_norm(draw: Draw) -> Program:
    """Instance norm with and without running statistics."""
    count = draw.number(1, 3)
    channels = draw.number(1, 4)
    options = {"affine": draw.chance(0.5), "track_running_stats": draw.chance(0.4)}
    module = _drawn(draw, lambda: _INSTANCE_NORMS[count](channels, **options))
    module.train(draw.chance(0.7))
    text = f"{options} {'training' if module.training else 'evaluation'}"
    return on_module(draw, "instance norm", text, module, image(draw, channels, draw.extents(count)))


def layer_norm(draw: Draw) -> Program:
    """Layer norm over the last dimensions, or over channels as ConvNeXt does."""
    count = draw.number(1, 3)
    x = image(draw, draw.number(1, 4), draw.extents(count))
    first = draw.number(1, count + 1)
    last = draw.chance(0.3)
    shape = (x.shape[1],) if last else tuple(x.shape[first:])
    weight, bias = draw.tensor(*shape), draw.tensor(*shape)
    order = [0, *range(2, count + 2), 1]

    def run(world: World) -> None:
        given, w, b = world.put(x), world.plain(weight), world.plain(bias)
        y = F.layer_norm(given.permute(order) if last else given, shape, w, b)
        world.differentiate(y, x=given, w=w, b=b)

    return Program("layer norm", f"x{tuple(x.shape)} over {'channels' if last else shape}", run, count)


def dropout(draw: Draw) -> Program:
    """Dropout in training: the mask must be that of one process."""
    count = draw.number(1, 3)
    name = draw.pick("dropout", f"dropout{count}d", "alpha_dropout", "feature_alpha_dropout")
    p, training = draw.pick(0.0, 0.3, 0.8, 1.0), draw.chance(0.8)
    x = image(draw, draw.number(1, 4), draw.extents(count))
    function = getattr(F, name)
    text = f"{name} p={p} {'training' if training else 'evaluation'}"
    return on_function("dropout", text, lambda t: function(t, p, training), x, count, seed=draw.seed)


def softmax(draw: Draw) -> Program:
    """Softmax and its kin along any dimension."""
    count = draw.number(1, 3)
    x = image(draw, draw.number(1, 4), draw.extents(count))
    dim = draw.number(-1, count + 1)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda t: F.softmax(t, dim),
        "log_softmax": lambda t: F.log_softmax(t, dim),
        "normalize": lambda t: F.normalize(t, dim=dim),
        "logsumexp": lambda t: t.logsumexp(dim),
    }
    name = draw.pick(*functions)
    return on_function("softmax", f"{name} over {dim}", functions[name], x, count)
