"""Draws operators that act element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function
from distconv.jobs.verification.differential.worlds import World

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "x.sigmoid()": torch.Tensor.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "2 / (x * x + 1) - 3": lambda x: 2 / (x * x + 1) - 3,
    "x ** 3": lambda x: x**3,
    "-x.exp()": lambda x: -x.exp(),
    "relu in place": lambda x: F.relu(x * 2, inplace=True),
    "x + 1, then *= x": lambda x: (x + 1).mul_(x),
    "where(x > 0, x, 2 x)": lambda x: torch.where(x > 0, x, 2 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "detach": lambda x: x * x.detach(),
}

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "a - b": lambda a, b: a - b,
    "mul": torch.mul,
    "a / (b b + 1)": lambda a, b: a / (b * b + 1),
    "maximum": torch.maximum,
    "where(a > b, a, b)": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "add(alpha=2)": lambda a, b: torch.add(a, b, alpha=2),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "atan2": torch.atan2,
}


_IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add_": lambda y, b: y.add_(b),
    "mul_(y + b)": lambda y, b: y.mul_(y.detach() + b),
    "relu_": lambda y, b: F.relu_(y),
    "copy_": lambda y, b: y.copy_(b),
    "masked_fill_": lambda y, b: y.masked_fill_(b > 0, 1.5),
    "lerp_": lambda y, b: y.lerp_(b, 0.3),
    "flatten, add_": lambda y, b: y.flatten(1).add_(1),
    "view, mul_": lambda y, b: y.view(y.shape[0], -1).mul_(2),
    "transpose, mul_": lambda y, b: y.transpose(1, -1).mul_(2),
    "slice, zero_": lambda y, b: y[..., :1].zero_(),
    "channel, add_": lambda y, b: y[:, 0].add_(1),
    "narrow, fill_": lambda y, b: y.narrow(2, 0, 1).fill_(2.0),
    "chunk, mul_": lambda y, b: y.chunk(2, -1)[0].mul_(3),
    "setitem": lambda y, b: y.__setitem__((slice(None), 0), 1.0),
    "unsqueeze, sub_": lambda y, b: y.unsqueeze(1).sub_(1),
}
"""Changes of a tensor or of a view of it."""


def in_place(draw: Draw) -> Program:
    """A tensor changed where it is, also through views of it."""
    name = draw.pick(*_IN_PLACE)
    count = draw.number(1, 3)
    first = image(draw, draw.number(1, 3), draw.extents(count))
    second = draw.tensor(*first.shape)

    def run(world: World) -> None:
        a, b = world.put(first), world.put(second)
        y = a * 2
        _IN_PLACE[name](y, b)
        world.differentiate(y + b, a=a, b=b)

    return Program("in place", f"{name} x{tuple(first.shape)}", run, count)


def unary(draw: Draw) -> Program:
    """One tensor, element by element."""
    name = draw.pick(*_UNARY)
    count = draw.number(1, 3)
    return on_function("elementwise", name, _UNARY[name], image(draw, draw.number(1, 3), draw.extents(count)), count)


def binary(draw: Draw) -> Program:
    """Two tensors that broadcast; each of them may be plain, and have fewer dimensions."""
    name = draw.pick(*_BINARY)
    count = draw.number(1, 3)
    shape = (draw.number(1, 5), draw.number(1, 3), *draw.extents(count))
    axes = ("n", "c", *("d", "h", "w")[3 - count :])
    shapes = [tuple(1 if draw.chance(p) else n for n in shape) for p in (0.08, 0.35)]
    starts = [draw.number(0, count + 1) if draw.chance(p) else 0 for p in (0.04, 0.3)]
    values = [draw.tensor(*s[start:]) for s, start in zip(shapes, starts, strict=True)]
    plain = draw.weighted([(False, False), (False, True), (True, False)], [6, 3, 1])
    wanted = draw.weighted([(True, True), (True, False), (False, True)], [8, 1, 1])
    turned = draw.chance(0.3)

    def run(world: World) -> None:
        a, b = (
            world.plain(v, grad) if p else world.put(v, axes[start:], grad)
            for v, p, start, grad in zip(values, plain, starts, wanted, strict=True)
        )
        world.differentiate(_BINARY[name](b, a) if turned else _BINARY[name](a, b), a=a, b=b)

    text = f"{name} {[tuple(v.shape) for v in values]} plain={plain} gradients={wanted}"
    return Program("elementwise, two", text, run, count)
