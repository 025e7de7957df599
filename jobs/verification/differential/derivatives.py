"""Draws second derivatives: the gradient of a penalty on gradients, through one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from distconv.jobs.verification.differential.draw import Draw, DrawnProgram, image
from distconv.jobs.verification.engine.backends import ReferenceBackend

Shape = tuple[int, ...]
Layer = tuple[Callable[..., torch.Tensor], tuple[Shape, ...]]
"""A function of x and weights, and their shapes."""

_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d
}  # fmt: skip
_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _layers(draw: Draw, channels: int, count: int) -> dict[str, Layer]:
    kernel, filters = draw.numbers(count, 1, 3), draw.number(1, 3)
    stride, padding = draw.number(1, 3), draw.number(0, 1)
    groups = draw.pick(1, channels)
    per_channel = ((channels,), (channels,))
    return {
        f"convolution K{kernel} s{stride} F{filters}": (
            lambda x, w, b: _CONVOLUTIONS[count](x, w, b, stride, tuple(k // 2 for k in kernel)),
            ((filters, channels, *kernel), (filters,)),
        ),
        f"transposed convolution K{kernel} s{stride} F{filters}": (
            lambda x, w, b: _TRANSPOSED[count](x, w, b, stride),
            ((channels, filters, *kernel), (filters,)),
        ),
        "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), per_channel),
        f"group norm {groups}": (lambda x, w, b: F.group_norm(x, groups, w, b), per_channel),
        "layer norm": (lambda x: F.layer_norm(x, x.shape[2:]), ()),
        "max pooling": (lambda x: _POOLS[count](x, 2, stride, padding, ceil_mode=True), ()),
        "softmax": (lambda x: F.softmax(x, -1), ()),
        "amax": (lambda x: x.amax((0, 2)), ()),
        "std": (lambda x: x.std(-1, correction=0), ()),
        "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], *x.shape[2:]).long()), ()),
    }


def penalty(draw: Draw) -> DrawnProgram:
    """Return the squares of all first derivatives of a loss, differentiated again."""
    count = draw.number(1, 3)
    x = image(draw, draw.number(1, 4), draw.numbers(count, 2, 7 if count < 3 else 4))
    layers = _layers(draw, x.shape[1], count)
    name = draw.pick(*layers)
    function, shapes = layers[name]
    weights = [draw.tensor(*shape) for shape in shapes]

    def run(backend: ReferenceBackend) -> None:
        given = [backend.put(x), *(backend.plain(w) for w in weights)]
        y = function(*given)
        first = torch.autograd.grad((y * y * y).sum(), given, create_graph=True)
        for number, slope in enumerate(first):
            backend.record(f"first {number}", slope)
        total = sum((slope * slope).sum() for slope in first)
        assert isinstance(total, torch.Tensor)
        backend.differentiate(total, {f"x{number}": each for number, each in enumerate(given)})

    return DrawnProgram("second derivatives", f"x{tuple(x.shape)} {name}", run, count)
