"""Draws reductions, extremes, and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function, seeded
from distconv.jobs.verification.differential.worlds import World


def reduction(draw: Draw) -> Program:
    """Reductions over some dimensions, or all."""
    count = draw.number(1, 3)
    x = image(draw, draw.number(1, 3), draw.extents(count), ties=draw.chance(0.2))
    name = draw.weighted(["mean", "sum", "amax", "amin", "var", "std", "norm", "logsumexp"], [4, 4, 2, 1, 2, 1, 1, 1])
    options: dict[str, Any] = {}
    dims = draw.some(range(count + 2), count + 2)
    if dims or name == "logsumexp":
        signed = [d - draw.pick(0, count + 2) for d in dims or [0]]
        options["dim"] = signed[0] if len(signed) == 1 and draw.chance(0.5) else tuple(signed)
        options["keepdim"] = draw.chance(0.5)
    return on_function("reductions", f"{name} {options}", lambda given: getattr(given, name)(**options), x, count)


def extreme(draw: Draw) -> Program:
    """Extremes and where they are, with ties and NaN: torch takes the first."""
    count = draw.number(1, 3)
    x = image(draw, draw.number(1, 3), draw.extents(count), ties=draw.chance(0.5))
    if draw.chance(0.1):
        x.view(-1)[draw.number(0, x.numel() - 1)] = torch.nan
    name = draw.pick("max", "min", "argmax", "argmin")
    arguments: tuple[Any, ...] = ()
    if draw.chance(0.7):
        arguments = (draw.number(-1, count + 1), draw.chance(0.5))

    def run(given: torch.Tensor) -> Any:
        found = getattr(given, name)(*arguments)
        return found if isinstance(found, torch.Tensor) else tuple(found)

    return on_function("extremes", f"{name}{arguments}", run, x, count)


def linear(draw: Draw) -> Program:
    """nn.Linear on samples, or on the last of several dimensions."""
    samples, inputs, outputs = draw.numbers(3, 1, 8)
    module = seeded(draw, lambda: nn.Linear(inputs, outputs, draw.chance(0.7)))
    between = draw.numbers(draw.weighted([0, 1, 2], [6, 1, 1]), 1, 9)
    x = draw.tensor(samples, *between, inputs)
    last = "c" if draw.chance(0.5) else None
    dims = ("n", *("h", "w")[2 - len(between) :], last)
    parallel = draw.chance(0.5)

    def run(world: World) -> None:
        own, given = world.model(module, parallel), world.put(x, dims)
        world.differentiate(own(given), x=given)
        world.state(own)

    return Program("linear", f"x{tuple(x.shape)} {dims} -> {outputs}", run, max(len(between), 1))


_PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a @ b^T": lambda a, b: a @ b.transpose(-1, -2),
    "a^T @ b": lambda a, b: torch.matmul(a.transpose(-1, -2), b),
    "einsum nc...,nc...->n": lambda a, b: torch.einsum("nc...,nc...->n", a, b),
    "einsum nc...,mc...->nm": lambda a, b: torch.einsum("nc...,mc...->nm", a, b),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b),
}


def product(draw: Draw) -> Program:
    """Matrix products of two tensors, one of which may be plain."""
    name = draw.pick(*_PRODUCTS)
    count = draw.number(1, 2)
    shape = (draw.number(1, 4), draw.number(1, 4), *draw.extents(count))
    a, b = draw.tensor(*shape), draw.tensor(*shape)
    plain = draw.chance(0.3)

    def run(world: World) -> None:
        first, second = world.put(a), world.plain(b) if plain else world.put(b)
        world.differentiate(_PRODUCTS[name](first, second), a=first, b=second)

    return Program("products", f"{name} {shape} plain={plain}", run, count)


def further(draw: Draw) -> Program:
    """What models also call; an operator without a rule must say so."""
    count = draw.number(1, 2)
    x = image(draw, 4, draw.extents(count))
    order = draw.number(0, 3)
    options: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "cumsum": lambda t: t.cumsum(-1),
        "sort": lambda t: t.sort(-1)[0],
        "topk": lambda t: t.topk(1, 1)[0],
        "median": lambda t: t.median(-1)[0],
        "prod": lambda t: t.prod(1),
        "unfold": lambda t: t.unfold(-1, 1, 1),
        "diff": lambda t: t.diff(),
        "diff with ends": lambda t: t.diff(order, 1, t[:, :1], t[:, 1:]),
        "addmm": lambda t: torch.addmm(t[0, 0].reshape(-1)[:1], torch.ones(3, 2).double(), torch.ones(2, 1).double()),
        "glu": lambda t: F.glu(t, 1),
        "local_response_norm": lambda t: F.local_response_norm(t, 2),
        "rms_norm": lambda t: F.rms_norm(t, t.shape[-1:]),
    }
    name = draw.pick(*options)
    return on_function("further", name, options[name], x, count)
