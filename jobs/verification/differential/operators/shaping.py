"""Draws operators that join tensors, move elements, or pick some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function
from distconv.jobs.verification.differential.worlds import World

_Function = Callable[[torch.Tensor], Any]


def concatenation(draw: Draw) -> Program:
    """``cat`` and ``stack`` of two or three tensors, each in a distribution of its own; some are plain."""
    count = draw.number(1, 3)
    shape = [draw.number(1, 5), draw.number(1, 3), *draw.extents(count)]
    stacked = draw.chance(0.2)
    dim = draw.number(0, count + 1) if draw.chance(0.5) else 1
    shapes = [list(shape) for _ in range(draw.number(1, 3))]
    if not stacked:
        for changed in shapes:
            changed[dim] = draw.number(1, 6)
    values = [draw.tensor(*each) for each in shapes]
    plain = [i > 0 and draw.chance(0.15) for i in range(len(values))]
    wanted = [draw.chance(0.85) for _ in values]
    signed = dim - draw.pick(0, count + 2 + stacked)

    def run(world: World) -> None:
        given = zip(values, plain, wanted, strict=True)
        parts = [world.plain(v, grad) if p else world.put(v, grad=grad) for v, p, grad in given]
        y = (torch.stack if stacked else torch.cat)(parts, signed)
        world.differentiate(y, **{f"x{i}": part for i, part in enumerate(parts)})

    text = f"{'stack' if stacked else 'cat'} {[tuple(s) for s in shapes]} dim={signed} plain={plain}"
    return Program("cat, stack", text, run, count)


def _reshapes(draw: Draw, shape: Sequence[int], dim: int) -> dict[str, _Function]:
    n, c, *sizes = shape
    order = draw.some(range(len(shape)), len(shape))
    order += [d for d in range(len(shape)) if d not in order]
    return {
        "flatten(1)": lambda t: t.flatten(1),
        "flatten(2)": lambda t: t.flatten(2),
        "view(n, -1)": lambda t: t.view(t.shape[0], -1) if t.is_contiguous() else t.reshape(t.shape[0], -1),
        "reshape(n, c, -1)": lambda t: t.reshape(n, c, -1),
        "reshape(n c, 1, ...)": lambda t: t.reshape(n * c, 1, *sizes),
        "unflatten(1)": lambda t: t.unflatten(1, (-1, 1)),
        "unsqueeze": lambda t: t.unsqueeze(dim),
        "squeeze(1)": lambda t: t.squeeze(1),
        f"permute{order}": lambda t: t.permute(order),
        "transpose": lambda t: t.transpose(1, -1),
        "movedim": lambda t: t.movedim(dim, 0),
        "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
        "expand a mean": lambda t: t.mean(dim, keepdim=True).expand_as(t),
    }


def _moves(draw: Draw, shape: Sequence[int], dim: int) -> dict[str, _Function]:
    extent = shape[dim]
    shift, times = draw.number(-extent, 2 * extent), draw.number(1, 3)
    dims = sorted({dim, draw.number(0, len(shape) - 1)})
    return {
        f"flip{dims}": lambda t: t.flip(dims),
        f"roll({shift}, {dim})": lambda t: t.roll(shift, dim),
        "roll of two": lambda t: torch.roll(t, (shift, 1), (dim, -1)),
        f"repeat({dim})": lambda t: t.repeat(*(times if d == dim else 1 for d in range(t.dim()))),
        f"repeat_interleave({times}, {dim})": lambda t: t.repeat_interleave(times, dim),
        f"unbind({dim})": lambda t: t.unbind(dim),
        f"chunk({times}, {dim})": lambda t: t.chunk(times, dim),
        f"split({times}, {dim})": lambda t: t.split(times, dim),
    }


def _slices(draw: Draw, shape: Sequence[int], dim: int) -> dict[str, _Function]:
    start = draw.number(0, shape[dim] - 1)
    stop, step = draw.number(start + 1, shape[dim]), draw.number(1, 3)
    index = torch.tensor(draw.numbers(draw.number(1, 4), 0, shape[dim] - 1))
    before = (slice(None),) * dim
    return {
        f"[dim {dim}, {start}:{stop}:{step}]": lambda t: t[(*before, slice(start, stop, step))],
        f"[dim {dim}, {start}]": lambda t: t[(*before, start)],
        f"[dim {dim}, {start - shape[dim]}:]": lambda t: t[(*before, slice(start - shape[dim], None))],
        f"narrow({dim}, {start})": lambda t: t.narrow(dim, start, stop - start),
        f"select({dim}, {start})": lambda t: t.select(dim, start),
        f"index_select({dim})": lambda t: t.index_select(dim, index),
        "[:, 0]": lambda t: t[:, 0],
        "differences": lambda t: t[..., 1:] - t[..., :-1],
    }


def shaping(draw: Draw) -> Program:
    """Operators that only move elements, or pick some of them."""
    count = draw.number(1, 3)
    x = image(draw, draw.pick(1, 2, 4), draw.extents(count))
    dim = draw.number(0, count + 1)
    options = draw.pick(_reshapes, _moves, _slices)(draw, x.shape, dim)
    name = draw.pick(*options)
    return on_function("shaping", name, options[name], x, count)
