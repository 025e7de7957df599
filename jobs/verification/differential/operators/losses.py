"""Draws losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image
from distconv.jobs.verification.differential.worlds import World

_ELEMENTWISE: tuple[Callable[..., torch.Tensor], ...] = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
)


def cross_entropy(draw: Draw) -> Program:
    """Cross entropy of classes or probabilities, per sample or per pixel."""
    count = draw.number(0, 3)
    samples, classes, sizes = draw.number(1, 6), draw.number(2, 5), draw.extents(count)
    logits = draw.tensor(samples, classes, *sizes)
    options: dict[str, Any] = {"reduction": draw.weighted(["mean", "sum", "none"], [4, 1, 1])}
    if draw.chance(0.3):
        options["label_smoothing"] = 0.1
    probabilities = draw.chance(0.15)
    axes = ("n", *("d", "h", "w")[3 - count :])
    dims: tuple[str | None, ...] = axes
    if probabilities:
        target, dims = draw.tensor(*logits.shape).softmax(1), ("n", "c", *axes[1:])
    else:
        target = draw.classes(samples, *sizes, below=classes)
        if draw.chance(0.5):
            ignored = draw.pick(-100, 0, 1)
            options["ignore_index"] = ignored
            target = torch.where(draw.tensor(samples, *sizes) > draw.pick(0.5, -0.5, -9), ignored, target)
    weight = draw.tensor(classes).abs() + 0.1 if draw.chance(0.4) else None

    def run(world: World) -> None:
        x = world.put(logits, ("n", "c", *axes[1:]))
        given = None if weight is None else world.plain(weight, grad=False)
        world.differentiate(F.cross_entropy(x, world.put(target, dims, grad=False), given, **options), x=x)

    text = f"x{tuple(logits.shape)} {options} weight={weight is not None} probabilities={probabilities}"
    return Program("cross entropy", text, run, max(count, 1))


def binary_cross_entropy(draw: Draw) -> Program:
    """BCE with logits; weights of several shapes."""
    count = draw.number(1, 3)
    channels, sizes = draw.number(1, 3), draw.extents(count)
    x = image(draw, channels, sizes)
    target = draw.classes(*x.shape, below=2).double()
    reduction = draw.weighted(["mean", "sum", "none"], [4, 1, 1])
    pos_weight = draw.tensor(channels, *(1,) * count).abs() if draw.chance(0.4) else None
    shape = draw.pick(tuple(x.shape), (channels, *(1,) * count), (1,))
    weight = draw.tensor(*shape).abs() if draw.chance(0.4) else None
    split = weight is not None and weight.shape == x.shape and draw.chance(0.7)

    def run(world: World) -> None:
        given = world.put(x)
        own_weight = None if weight is None else world.put(weight, grad=False) if split else weight
        loss = F.binary_cross_entropy_with_logits(
            given, world.put(target, grad=False), own_weight, reduction=reduction, pos_weight=pos_weight
        )
        world.differentiate(loss, x=given)

    shapes = [None if w is None else tuple(w.shape) for w in (weight, pos_weight)]
    return Program("BCE with logits", f"x{tuple(x.shape)} {reduction} weights={shapes} split={split}", run, count)


def other_loss(draw: Draw) -> Program:
    """MSE, L1 and their kin."""
    function = draw.pick(*_ELEMENTWISE)
    count = draw.number(1, 3)
    reduction = draw.weighted(["mean", "sum", "none"], [4, 1, 1])
    x = image(draw, draw.number(1, 3), draw.extents(count))
    target = draw.tensor(*x.shape).sigmoid()

    def run(world: World) -> None:
        given, wanted = world.put(x), world.put(target)
        y = function(given.sigmoid(), wanted.detach(), reduction=reduction)
        world.differentiate(y, x=given)

    return Program(
        "other losses", f"{getattr(function, '__name__', function)} x{tuple(x.shape)} {reduction}", run, count
    )
