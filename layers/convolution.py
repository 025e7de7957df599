"""Distributed convolution over samples and space, with the halo exchange behind the local work.

    forward    1 start the halo exchange of x   2 convolve what is owned   3 finish   4 add the strips' share
    backward   1 dL/dx of the strips   2 start sending it to its owners   3 dL/dx and dL/dw of what is owned   4 finish

x is never copied where the geometry permits; elsewhere the needed box is assembled (kernels.convolution.merged).

Source: Dryden et al. 2019, III-A (algorithms) and IV-A (overlap).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.errors import UnsupportedOperation
from distconv.functions import apply
from distconv.kernels.convolution import Convolution, Geometry, Piece, Range, cut, is_free, merged
from distconv.layers.alignment import check_dtypes, result_shape, whole_channels, whole_over
from distconv.layers.windows import spatial_box, spread, window_needs
from distconv.tensor import DistTensor
from distconv.transfer import Accumulation, TransferPlan, transfer_plan


@dataclass(frozen=True)
class _Layer:
    """Everything about one convolution that does not depend on values: planned once, run many times."""

    plan: TransferPlan
    work: Convolution
    own: tuple[Range, ...]
    slabs: tuple[tuple[Range, ...], ...]
    free: bool

    @property
    def needed(self) -> tuple[Range, ...]:
        return tuple(self.work.geometry.needed(d, out) for d, out in enumerate(self.work.out))

    def pieces(self, x: torch.Tensor, slabs: Sequence[torch.Tensor]) -> list[Piece]:
        """What is convolved: the owned block and each slab by itself, or the one needed box made of them."""
        found = [Piece(x, self.own), *(Piece(v, box) for v, box in zip(slabs, self.slabs, strict=True))]
        return found if self.free else [merged(found, self.needed)]


@lru_cache(maxsize=4096)
def _layer(dist: Distribution, shape: torch.Size, out_shape: torch.Size, geometry: Geometry, groups: int) -> _Layer:
    plan = transfer_plan(dist, window_needs(dist, out_shape, geometry), tuple(shape), ghosts=True)
    own, out = spatial_box(dist, shape), spatial_box(dist, out_shape)
    slabs = tuple(tuple((i.start, i.stop) for i in box[2:]) for box in plan.parts)
    work = Convolution(geometry, groups, out)
    return _Layer(plan, work, own, slabs, is_free(own, out, geometry))


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _Layer
    ) -> torch.Tensor:
        transfer = layer.plan.start(x, "convolution halo exchange")
        if layer.free:
            y = layer.work.forward(Piece(x, layer.own), weight, bias)
            slabs = transfer.finish()
            layer.work.add(y, layer.pieces(x, slabs)[1:], weight)
        else:
            slabs = transfer.finish()
            y = layer.work.forward(layer.pieces(x, slabs)[0], weight, bias)
        ctx.layer = layer
        ctx.save_for_backward(x, weight, *slabs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: _Layer = ctx.layer
        x, weight, *slabs = ctx.saved_tensors
        grad = grad.contiguous()
        pieces = layer.pieces(x, slabs)
        dx = dw = db = sending = None
        if ctx.needs_input_grad[0]:
            dx, sending = _start_input_gradient(layer, grad, pieces, weight)
        if ctx.needs_input_grad[1]:
            dw, db = layer.work.parameter_gradients(grad, pieces, weight, bias=ctx.needs_input_grad[2])
        elif ctx.needs_input_grad[2]:
            db = grad.sum([d for d in range(grad.dim()) if d != 1])
        if sending is not None and dx is not None:
            sending.finish(dx)
        return dx, dw, db, None


def _start_input_gradient(
    layer: _Layer, grad: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor
) -> tuple[torch.Tensor, Accumulation]:
    """dL/dx of the owned block so far, and what is on its way between neighbours."""
    if layer.free:
        ghosts = [layer.work.input_gradient(grad, piece, weight) for piece in pieces[1:]]
        sending = layer.plan.start_accumulate(ghosts, grad, "convolution halo accumulation")
        return layer.work.input_gradient(grad, pieces[0], weight), sending
    whole = Piece(layer.work.input_gradient(grad, pieces[0], weight), layer.needed)
    sending = layer.plan.start_accumulate(
        [cut(whole, box) for box in layer.slabs], grad, "convolution halo accumulation"
    )
    return cut(whole, layer.own), sending


def _convolution(
    function: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> DistTensor:
    """``torch.conv1d``, ``conv2d`` or ``conv3d`` of x (N, C, [D, [H,]] W), split over samples and space."""
    check_dtypes(function, input, weight, bias, stride, padding, dilation, groups)
    out_shape = result_shape(function, input, weight, bias, stride, padding, dilation, groups)
    if not isinstance(input, DistTensor):
        raise UnsupportedOperation("convolution of a plain tensor with a distributed weight: scatter the input first")
    count = weight.dim() - 2
    if input.dim() != count + 2:
        raise UnsupportedOperation(
            f"convolution of {input.dim()} dimensions without a sample dimension: add it (unsqueeze(0))"
        )
    x = whole_channels(input, "convolution")
    kernel, dilations = tuple(weight.shape[2:]), spread(dilation, count)
    geometry = Geometry(kernel, spread(stride, count), _front(padding, kernel, dilations), dilations)
    w = whole_over(weight, x.dist)
    b = None if bias is None else whole_over(bias, x.dist)
    layer = _layer(x.dist, x.shape, out_shape, geometry, groups)
    return DistTensor(apply(_Convolve, x.local, w, b, layer), x.dist, out_shape)


def _front(padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Padding in front of each dimension; what is behind follows from the output's extent."""
    if padding == "same":
        return tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    if padding == "valid":
        return (0,) * len(kernel)
    assert not isinstance(padding, str)
    return spread(padding, len(kernel))


for _function in (torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d):
    implements(_function)(partial(_convolution, _function))
