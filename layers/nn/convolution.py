"""Convolution, split over samples, space, channels and filters.

The output y has the distribution of the input x. The splits determine what a rank receives:

- samples: nothing (sample parallelism);
- space: the halo, which is the input that the kernel reaches beyond the rank's own block (spatial parallelism);
- channels (grid axis ``c``): the input channels of the rank's weights. Partial sums of y are reduce-scattered
  (channel and filter parallelism).

The splits combine. Halo and channels, together called ghosts, arrive in one exchange. It overlaps with the convolution
of the owned block::

    forward   [f1]  start the halo exchange of x  ------+
              [f2]  y = convolution of the owned block  |  messages in flight
              [f3]  wait for the ghosts  <--------------+
              [f4]  y += convolution of the ghosts
              [f5]  if y is a partial sum: reduce-scatter it

    backward  [b1]  dL/dx of the ghosts
              [b2]  start the reverse halo exchange  --------+
              [b3]  dL/dx of the owned block, dL/dw, dL/db   |  messages in flight
              [b4]  wait, add the received values to dL/dx  <+

If the geometry requires a padded copy, or if there is too little work to overlap, the needed input is assembled first
and convolved by one call.

Two things differ from the paper:

- The paper exchanges a halo of dL/dy to compute dL/dx. Here each rank computes dL/dx of its ghosts and returns it to
  the owners, who add it. The plan of [f1] serves both directions, for any kernel, stride, padding and dilation.
- dL/dw and dL/db leave this module as local contributions. Their all-reduce is the backward pass of
  ``both_whole_over``, ``weight_block`` and ``parameter_block``.

Source: Dryden et al. 2019, III-A (samples and space), III-D (channels and filters) and IV-A (overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from distconv.autograd.derivatives import differentiable_gradients
from distconv.communication.collectives import apply, gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import Accumulation, TransferPlan, transfer_plan
from distconv.dispatch import StridePolicy, implements
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.grid import cached_on_grid
from distconv.kernels.convolution import (
    CONVOLUTIONS,
    Convolution,
    Geometry,
    Piece,
    Range,
    assemble_input,
    crop,
    is_below_overlap_threshold,
    is_convolvable_without_copy,
)
from distconv.layers.common.alignment import (
    as_autocast,
    both_whole_over,
    check_as_torch,
    check_dtypes,
    result_shape,
)
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape, run_like_other_ranks
from distconv.layers.common.input_windows import fitted, spatial_box, spread, window_needs
from distconv.layers.common.sharded_weights import (
    channel_needs,
    over_whole_channels,
    parameter_block,
    summed_at_owners,
    weight_block,
    with_channels_split,
)
from distconv.layers.math.pointwise import pointwise
from distconv.layers.tensor.reshaping import squeeze, unsqueeze
from distconv.parameters.channel_split import AXIS, ChannelSplit, channel_split, groups_divide
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class _ConvolutionPlan:
    """Plan of one convolution on this rank: everything that does not depend on values.

    A box is a range of channels, then one range for each spatial dimension, in global indices of x. Samples are never
    exchanged. ``free`` and ``small`` decide how the rank computes but not which messages it sends, so they may differ
    between ranks.
    """

    plan: TransferPlan
    """Moves the ghosts to this rank, and their gradients back to the owners."""
    work: Convolution
    """The computation of this rank's block of y from pieces of x."""
    block: tuple[Range, ...]
    """The box of x that this rank owns."""
    own: tuple[Range, ...]
    """The part of ``block`` from which this rank computes: without channels that only other ranks need."""
    slabs: tuple[tuple[Range, ...], ...]
    """The boxes of the ghosts."""
    free: bool
    """True to convolve the owned block and each ghost separately, without a copy. Otherwise ``needed`` is assembled."""
    small: bool
    """True to call torch once forward and once backward, because there is too little work to overlap messages with.

    Otherwise the gradients of input and parameters are computed by separate calls.
    """

    @property
    def needed(self) -> tuple[Range, ...]:
        """The box of all input of this rank's block of y: ``own``, ``slabs`` and padding."""
        space = (self.work.geometry.needed(d, out) for d, out in enumerate(self.work.out))
        return (self.work.channels, *space)

    def pieces(self, x: torch.Tensor, slabs: Sequence[torch.Tensor]) -> list[Piece]:
        """Return the pieces to convolve: the owned block and each ghost, or one piece assembled from them.

        ``slabs`` may be empty before the ghosts have arrived.
        """
        first = self.own[0][0] - self.block[0][0]
        own = x if self.own == self.block else x[:, first : first + self.own[0][1] - self.own[0][0]]
        pieces = [Piece(own, self.own), *(Piece(v, box) for v, box in zip(slabs, self.slabs, strict=bool(slabs)))]
        return pieces if self.free else [assemble_input(pieces, self.needed)]


@cached_on_grid
def _layer(
    dist: Distribution,
    shape: torch.Size,
    out_shape: torch.Size,
    geometry: Geometry,
    groups: int,
    split: ChannelSplit | None,
    small: bool,
) -> _ConvolutionPlan:
    """Plan the convolution of x of the global ``shape``; ``split`` is None if channels are not split. Collective."""
    channels = None if split is None else channel_needs(dist, 1, split)
    needs = window_needs(dist, out_shape, geometry, channels)
    plan = transfer_plan(dist, needs, tuple(shape), ghosts=True)
    block = tuple((i.start, i.stop) for i in dist.box(None, shape)[1:])
    wanted = (0, shape[1]) if split is None else tuple(split.input_channels(dist.coordinate(1)))
    start = min(max(block[0][0], wanted[0]), wanted[1])
    own = ((start, max(start, min(block[0][1], wanted[1]))), *block[1:])
    out = spatial_box(dist, out_shape)
    slabs = tuple(tuple((i.start, i.stop) for i in box[1:]) for box in plan.destinations)
    work = Convolution(geometry, groups if split is None else split.local_groups, out, (wanted[0], wanted[1]))
    in_pieces = not small or not slabs
    free = in_pieces and own[0][1] > own[0][0] and is_convolvable_without_copy(block[1:], out, geometry)
    return _ConvolutionPlan(plan, work, block, own, slabs, free, small)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _ConvolutionPlan
    ) -> torch.Tensor:
        transfer = layer.plan.start(x, "convolution halo exchange")  # [f1]
        if layer.free:
            y = layer.work.forward(layer.pieces(x, ())[0], weight, bias)  # [f2]
            slabs = transfer.finish()  # [f3]
            layer.work.add(y, layer.pieces(x, slabs)[1:], weight)  # [f4]
        else:
            slabs = transfer.finish()  # [f3]
            (box,) = layer.pieces(x, slabs)
            y = layer.work.forward(box, weight, bias)  # [f2] and [f4]
            # To save memory, a large piece is assembled again in backward.
            slabs = [box.values] if layer.small else slabs
        ctx.layer = layer
        ctx.save_for_backward(x, weight, *slabs)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: _ConvolutionPlan = ctx.layer
        x, weight, *slabs = ctx.saved_tensors
        if torch.is_grad_enabled():
            bias = weight.new_zeros(weight.shape[0], requires_grad=True)
            return (
                *differentiable_gradients(
                    partial(_assembled, layer), (x, weight, bias), ctx.needs_input_grad[:3], grad
                ),
                None,
            )
        grad = grad.contiguous()
        if layer.small:
            (piece,) = layer.pieces(x, ()) if layer.free else [Piece(slabs[0], layer.needed)]
            return (*_all_gradients(layer, grad, piece, weight, ctx.needs_input_grad[:3]), None)
        pieces = layer.pieces(x, slabs)
        dx = dw = db = sending = None
        if ctx.needs_input_grad[0]:
            dx, sending = _start_input_gradient(layer, grad, pieces, weight)  # [b1] to [b3]
        if ctx.needs_input_grad[1]:  # [b3], which overlaps with the messages
            dw, db = layer.work.parameter_gradients(grad, pieces, weight, bias=ctx.needs_input_grad[2])
        elif ctx.needs_input_grad[2]:
            db = grad.sum([d for d in range(grad.dim()) if d != 1])
        if sending is not None and dx is not None:
            sending.finish(dx)  # [b4]
        return dx, dw, db, None


def _all_gradients(
    layer: _ConvolutionPlan, grad: torch.Tensor, piece: Piece, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return dL/dx, dL/dw and dL/db by one call, given the one piece that is all of the needed input."""
    dx, dw, db = layer.work.gradients(grad, piece, weight, wanted)  # [b1] and [b3]
    if dx is None:
        return None, dw, db
    own, sending = _sent_back(layer, Piece(dx, piece.box), grad)  # [b2]
    return sending.finish(own), dw, db  # [b4]


def _assembled(layer: _ConvolutionPlan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return y (N, F, ...), without overlap, by operators that have derivatives of any order."""
    plan, work = layer.plan, layer.work
    needs = cast("Needs", plan.dst)
    box = gather_region(x, transfer_plan(needs.base, needs, plan.shape))
    box = fitted(box, needs.box(plan.shape)[2:], layer.needed[1:])
    shape = (x.shape[0], weight.shape[0], *(b - a for a, b in work.out))
    geometry, groups = work.geometry, work.groups
    empty = 0 in (*shape, *box.shape)
    if empty:
        # torch rejects empty operands, but this rank's graph must be that of the others: backward passes send their
        # messages in its order, and a rank that sends none leaves the others waiting.
        box = pad_to_minimum_shape(box, (1, groups, *map(geometry.reach, range(len(work.out)))))
        weight = pad_to_minimum_shape(weight, (groups, 1, *geometry.kernel))
        bias = pad_to_minimum_shape(bias, (groups,))
    y = CONVOLUTIONS[len(work.out)](box, weight, bias, geometry.stride, 0, geometry.dilation, groups)
    return connected_zeros(y, shape) if empty else y


def _start_input_gradient(
    layer: _ConvolutionPlan, grad: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor
) -> tuple[torch.Tensor, Accumulation]:
    """Return this rank's contribution to dL/dx of the owned block, and the reverse halo exchange in flight."""
    if layer.free:
        ghosts = [layer.work.input_gradient(grad, piece, weight) for piece in pieces[1:]]  # [b1]
        sending = layer.plan.start_accumulate(ghosts, grad, "convolution halo accumulation")  # [b2]
        own = Piece(layer.work.input_gradient(grad, pieces[0], weight), layer.own)  # [b3]
        return (own.values if layer.own == layer.block else crop(own, layer.block)), sending
    (whole,) = pieces
    return _sent_back(layer, Piece(layer.work.input_gradient(grad, whole, weight), whole.box), grad)


def _sent_back(layer: _ConvolutionPlan, whole: Piece, grad: torch.Tensor) -> tuple[torch.Tensor, Accumulation]:
    """Return the owned block of dL/dx of all needed input, and the reverse halo exchange of the rest in flight."""
    shares = [crop(whole, box) for box in layer.slabs]
    return crop(whole, layer.block), layer.plan.start_accumulate(shares, grad, "convolution halo accumulation")


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
    """Convolve a distributed tensor as ``torch.conv1d``, ``conv2d`` or ``conv3d`` does.

    Parameters
    ----------
    function : callable
        torch's function. It determines shapes and errors, and computes if only samples are split.
    input : DistTensor
        x (N, C, [D, [H,]] W), or (C, [D, [H,]] W) without a sample dimension. Any dimension may be split.
    weight : Tensor or DistTensor
        w (F, C / groups, [kD, [kH,]] kW). A plain tensor is identical on all ranks.
    bias : Tensor or DistTensor, optional
        Shape (F,).
    stride, padding, dilation, groups
        As in torch, ``padding="same"`` and ``"valid"`` included.

    Returns
    -------
    DistTensor
        y (N, F, [D, [H,]] W), distributed as the input, in balanced blocks.

    Raises
    ------
    ShapeError, DtypeError
        If torch rejects the operands, with torch's message on all ranks.
    NoRule
        If ``input`` is a plain tensor.
    """
    check_dtypes(function, input, weight, bias, stride, padding, dilation, groups)
    out_shape = result_shape(function, input, weight, bias, stride, padding, dilation, groups)
    if not isinstance(padding, str) and min(spread(padding, 1)) < 0:
        check_as_torch(function, input, weight, bias, stride, padding, dilation, groups)
    if not isinstance(input, DistTensor):
        raise NoRule("convolution of a plain tensor with a distributed weight: scatter the input first")
    count = weight.dim() - 2
    if input.dim() == count + 1:
        one = _convolution(function, unsqueeze(input, 0), weight, bias, stride, padding, dilation, groups)
        return squeeze(one, 0)
    if input.is_complex():
        return _of_complex(partial(_convolution, function), input, weight, bias, stride, padding, dilation, groups)
    x = with_channels_split(input, 1, weight)
    kernel, dilations, strides = tuple(weight.shape[2:]), spread(dilation, count), spread(stride, count)
    geometry = Geometry(kernel, strides, _front(padding, kernel, dilations), dilations)
    if x.dist.split[1] is None:
        w, b = both_whole_over(weight, bias, x.dist)
        if not any(x.dist.split[2:]):
            # Sample parallelism: nothing is exchanged, and torch's operator has its own backward.
            call = partial(function, stride=stride, padding=padding, dilation=dilation, groups=groups)
            y = run_like_other_ranks(call, x.dist.local_shape(out_shape), *as_autocast(x.local, w, b))
            return DistTensor(y, x.dist, out_shape)
        layer = _layer(
            x.dist,
            x.shape,
            out_shape,
            geometry,
            groups,
            None,
            is_below_overlap_threshold(x.local.shape, w.shape, on_gpu=w.is_cuda),
        )
        return DistTensor(apply(_Convolve, *as_autocast(x.local, w, b), layer), x.dist, out_shape)
    parts = x.grid.shape[AXIS]
    if not groups_divide(groups, weight.shape[0], parts):
        again = partial(_convolution, function, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return over_whole_channels(again, x, weight, bias)
    split = channel_split(x.shape[1], weight.shape[0], groups, parts, strides)
    w = weight_block(weight, x.dist, split)
    b = None if bias is None else parameter_block(bias, x.dist, [1])
    layer = _layer(
        x.dist,
        x.shape,
        out_shape,
        geometry,
        groups,
        split,
        is_below_overlap_threshold(x.local.shape, w.shape, on_gpu=w.is_cuda),
    )
    y = apply(_Convolve, *as_autocast(x.local, w, b if split.blocks == 1 else None), layer)
    if split.blocks > 1:
        y = summed_at_owners(y, x.dist, out_shape, 1, split)  # [f5]
        # The bias follows, because each partial sum would add it.
        y = y if b is None else y + b.to(y.dtype).view(-1, *(1,) * count)
    return DistTensor(y, x.dist, out_shape)


def _of_complex(
    convolve: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> DistTensor:
    """Convolve complex operands by three real convolutions, as torch does."""
    real, imaginary = convolve(x.real, weight.real, None, *options), convolve(x.imag, weight.imag, None, *options)
    both = convolve(x.real + x.imag, weight.real + weight.imag, None, *options)
    y: DistTensor = pointwise(torch.complex, real - imaginary, both - real - imaginary)
    return y if bias is None else pointwise(torch.add, y, bias.reshape(-1, *(1,) * (weight.dim() - 2)))


def _front(padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before each dimension; the padding after it follows from the size of the output."""
    if padding == "same":
        return tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    if padding == "valid":
        return (0,) * len(kernel)
    assert not isinstance(padding, str)
    return spread(padding, len(kernel))


for _function in {getattr(h, f"conv{d}d") for h in (torch, F) for d in (1, 2, 3)}:
    implements(_function, order=StridePolicy.OF_LAYER, tensors="input weight bias")(partial(_convolution, _function))
