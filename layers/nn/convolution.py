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
  ``replicate_parameters``, ``weight_block`` and ``parameter_block``.

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
from distconv.distribution import Box, Distribution, Interval
from distconv.errors import NoRule
from distconv.grid import cached_on_grid
from distconv.kernels.convolution import (
    CONVOLUTIONS,
    Convolution,
    Geometry,
    Piece,
    assemble_input,
    crop,
    is_below_overlap_threshold,
    is_convolvable_without_copy,
)
from distconv.layers.common.alignment import (
    check_dtypes,
    check_on_zeros,
    replicate_parameters,
    result_shape,
    to_autocast_dtype,
)
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape, run_like_other_ranks
from distconv.layers.common.input_windows import crop_or_pad, to_tuple, window_needs
from distconv.layers.common.sharded_weights import (
    channel_needs,
    parameter_block,
    redistribute_channels,
    reduce_scatter_output,
    run_with_gathered_channels,
    weight_block,
)
from distconv.layers.math.pointwise import pointwise
from distconv.layers.tensor.reshaping import squeeze, unsqueeze
from distconv.memory_format import dense
from distconv.parameters.channel_split import AXIS, ChannelSplit, channel_split, groups_divide
from distconv.tensor import DistTensor

# -- the operator: which kind of parallelism applies ------------------------------------------------------------------


def convolution(
    function: Callable[..., torch.Tensor],
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
    if not isinstance(padding, str) and min(to_tuple(padding, 1)) < 0:
        check_on_zeros(function, input, weight, bias, stride, padding, dilation, groups)
    if not isinstance(input, DistTensor):
        raise NoRule("convolution of a plain tensor with a distributed weight: scatter the input first")
    convolve = partial(convolution, function, stride=stride, padding=padding, dilation=dilation, groups=groups)
    spatial_dims = weight.dim() - 2
    if input.dim() == spatial_dims + 1:
        return squeeze(convolve(unsqueeze(input, 0), weight, bias), 0)
    if input.is_complex():
        return _convolve_complex(convolve, input, weight, bias)

    x = redistribute_channels(input, 1, weight)
    kernel, dilations = tuple(weight.shape[2:]), to_tuple(dilation, spatial_dims)
    padding_before = _padding_before(padding, kernel, dilations)
    geometry = Geometry(kernel, to_tuple(stride, spatial_dims), padding_before, dilations)
    if x.dist.split[1] is not None:  # channel and filter parallelism
        if not groups_divide(groups, weight.shape[0], x.grid.shape[AXIS]):
            return run_with_gathered_channels(convolve, x, weight, bias)
        y = _convolve_split_channels(x, weight, bias, out_shape, geometry, groups)
        return DistTensor(y, x.dist, out_shape)
    w, b = replicate_parameters(weight, bias, x.dist)
    if any(x.dist.split[2:]):  # spatial parallelism, alone or with sample parallelism
        y = _convolve_block(x, w, b, out_shape, geometry, groups, None)
    else:  # sample parallelism: torch's own operator, with its own backward
        convolve_local = partial(function, stride=stride, padding=padding, dilation=dilation, groups=groups)
        y = run_like_other_ranks(convolve_local, x.dist.local_shape(out_shape), *to_autocast_dtype(x.local, w, b))
    return DistTensor(y, x.dist, out_shape)


def _convolve_split_channels(
    x: DistTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_shape: torch.Size,
    geometry: Geometry,
    groups: int,
) -> torch.Tensor:
    """Return this rank's block of y if channels are split, alone or with other dimensions (III-D). Collective."""
    split = channel_split(x.shape[1], weight.shape[0], groups, x.grid.shape[AXIS], geometry.stride)
    w = weight_block(weight, x.dist, split)
    b = None if bias is None else parameter_block(bias, x.dist, [1])
    if split.blocks == 1:  # the rank has all channels that its filters need
        return _convolve_block(x, w, b, out_shape, geometry, groups, split)
    y = _convolve_block(x, w, None, out_shape, geometry, groups, split)
    y = reduce_scatter_output(y, x.dist, out_shape, 1, split)  # [f5]
    # Only now, because each partial sum would add the bias.
    return y if b is None else y + b.to(y.dtype).view(-1, *(1,) * len(geometry.kernel))


def _convolve_block(
    x: DistTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_shape: torch.Size,
    geometry: Geometry,
    groups: int,
    split: ChannelSplit | None,
) -> torch.Tensor:
    """Return this rank's block of y, or a partial sum of it if the weight has only some of the channels. Collective."""
    single_call = is_below_overlap_threshold(x.local.shape, weight.shape, on_gpu=weight.is_cuda)
    plan = _plan_convolution(x.dist, x.shape, out_shape, geometry, groups, split, single_call)
    return apply(_Convolve, *to_autocast_dtype(x.local, weight, bias), plan)


# -- the plan: computed once, run many times --------------------------------------------------------------------------


@dataclass(frozen=True)
class _ConvolutionPlan:
    """Plan of one convolution on this rank: everything that does not depend on values.

    A box is a range of channels, then one range for each spatial dimension, in global indices of x. Samples are never
    exchanged. ``overlap`` and ``single_call`` decide how the rank computes but not which messages it sends, so they may
    differ between ranks.
    """

    exchange: TransferPlan
    """Moves the ghosts to this rank, and their gradients back to the owners."""
    local: Convolution
    """The computation of this rank's block of y from pieces of x."""
    owned: Box
    """The block of x that this rank owns."""
    used: Box
    """The part of ``owned`` from which this rank computes: without channels that only other ranks need."""
    ghosts: tuple[Box, ...]
    """The boxes that arrive from other ranks."""
    needed: Box
    """All input of this rank's block of y: ``used``, ``ghosts`` and padding."""
    overlap: bool
    """True to convolve the owned block and each ghost separately, without a copy. Otherwise ``needed`` is assembled."""
    single_call: bool
    """True to call torch once forward and once backward, because there is too little work to overlap messages with.

    Otherwise the gradients of input and parameters are computed by separate calls.
    """

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return y (N, F, ...) on this rank, and what ``backward`` needs in addition to x and the weight."""
        transfer = self.exchange.start(x, "convolution halo exchange")  # [f1]
        if self.overlap:
            y = self.local.forward(self._owned_piece(x), weight, bias)  # [f2]
            ghosts = transfer.finish()  # [f3]
            self.local.add(y, self._ghost_pieces(ghosts), weight)  # [f4]
            return y, ghosts
        ghosts = transfer.finish()  # [f3]
        piece = self._assemble(x, ghosts)
        y = self.local.forward(piece, weight, bias)  # [f2] and [f4]
        # To save memory, a large piece is assembled again in backward.
        return y, [piece.values] if self.single_call else ghosts

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        saved: Sequence[torch.Tensor],
        wanted: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return dL/dx of the owned block and the local contributions to dL/dw and dL/db; None if not ``wanted``."""
        if self.single_call:
            piece = self._owned_piece(x) if self.overlap else Piece(saved[0], self.needed)
            return self._backward_in_one_call(grad, piece, weight, wanted)
        pieces = [self._owned_piece(x), *self._ghost_pieces(saved)] if self.overlap else [self._assemble(x, saved)]
        dx = dw = db = reverse_exchange = None
        if wanted[0]:
            dx, reverse_exchange = self._start_input_gradient(grad, pieces, weight)  # [b1] to [b3]
        if wanted[1]:  # [b3]
            dw, db = self.local.parameter_gradients(grad, pieces, weight, bias=wanted[2])
        elif wanted[2]:
            db = grad.sum([dim for dim in range(grad.dim()) if dim != 1])
        if dx is not None and reverse_exchange is not None:
            reverse_exchange.finish(dx)  # [b4]
        return dx, dw, db

    def _backward_in_one_call(
        self, grad: torch.Tensor, piece: Piece, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, given the one piece that is all of the needed input."""
        dx_needed, dw, db = self.local.gradients(grad, piece, weight, wanted)  # [b1] and [b3]
        if dx_needed is None:
            return None, dw, db
        dx, reverse_exchange = self._start_reverse_exchange(Piece(dx_needed, piece.box), grad)  # [b2]
        return reverse_exchange.finish(dx), dw, db  # [b4]

    def _start_input_gradient(
        self, grad: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor
    ) -> tuple[torch.Tensor, Accumulation]:
        """Start the reverse halo exchange; return this rank's contribution to dL/dx of its block, and the exchange."""
        if not self.overlap:
            (piece,) = pieces
            dx_needed = Piece(self.local.input_gradient(grad, piece, weight), piece.box)  # [b1] and [b3]
            return self._start_reverse_exchange(dx_needed, grad)  # [b2]
        owned, *ghosts = pieces
        dx_ghosts = [self.local.input_gradient(grad, ghost, weight) for ghost in ghosts]  # [b1]
        reverse_exchange = self.exchange.start_accumulate(dx_ghosts, grad, "convolution halo accumulation")  # [b2]
        dx = self.local.input_gradient(grad, owned, weight)  # [b3]
        return dx if self.used == self.owned else crop(Piece(dx, self.used), self.owned), reverse_exchange

    def _start_reverse_exchange(self, dx: Piece, grad: torch.Tensor) -> tuple[torch.Tensor, Accumulation]:
        """Start the reverse halo exchange of dL/dx of all needed input; return its owned block and the exchange."""
        dx_ghosts = [crop(dx, box) for box in self.ghosts]
        reverse_exchange = self.exchange.start_accumulate(dx_ghosts, grad, "convolution halo accumulation")
        return crop(dx, self.owned), reverse_exchange

    def _owned_piece(self, x: torch.Tensor) -> Piece:
        if self.used == self.owned:
            return Piece(x, self.owned)
        # Channels that only other ranks' filters need: this rank sends them, but does not compute with them.
        first = self.used[0].start - self.owned[0].start
        return Piece(x[:, first : first + self.used[0].extent], self.used)

    def _ghost_pieces(self, ghosts: Sequence[torch.Tensor]) -> list[Piece]:
        return [Piece(values, box) for values, box in zip(ghosts, self.ghosts, strict=True)]

    def _assemble(self, x: torch.Tensor, ghosts: Sequence[torch.Tensor]) -> Piece:
        return assemble_input([self._owned_piece(x), *self._ghost_pieces(ghosts)], self.needed)

    def differentiable_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return y (N, F, ...), without overlap, by operators that have derivatives of any order."""
        # Another plan of the same needs: gather_region takes one without separate ghosts, and has derivatives itself.
        needs = cast("Needs", self.exchange.dst)
        block = gather_region(x, transfer_plan(needs.base, needs, self.exchange.shape))
        block = crop_or_pad(block, needs.box(self.exchange.shape)[2:], self.needed[1:])
        geometry, groups = self.local.geometry, self.local.groups
        shape = (x.shape[0], weight.shape[0], *(stop - start for start, stop in self.local.out))
        is_empty = 0 in (*shape, *block.shape)
        if is_empty:
            # torch rejects empty operands, but this rank's graph must be that of the others: backward passes send
            # their messages in its order, and a rank that sends none leaves the others waiting.
            reach = [geometry.reach(dim) for dim in range(len(geometry.kernel))]
            block = pad_to_minimum_shape(block, (1, groups, *reach))
            weight = pad_to_minimum_shape(weight, (groups, 1, *geometry.kernel))
            bias = pad_to_minimum_shape(bias, (groups,))
        convolve = CONVOLUTIONS[len(geometry.kernel)]
        y: torch.Tensor = convolve(block, weight, bias, geometry.stride, 0, geometry.dilation, groups)
        return connected_zeros(y, shape) if is_empty else y


@cached_on_grid
def _plan_convolution(
    dist: Distribution,
    shape: torch.Size,
    out_shape: torch.Size,
    geometry: Geometry,
    groups: int,
    split: ChannelSplit | None,
    single_call: bool,
) -> _ConvolutionPlan:
    """Plan the convolution of x of the global ``shape``; ``split`` is None if channels are not split. Collective."""
    needs = window_needs(dist, shape, out_shape, geometry, None if split is None else channel_needs(dist, 1, split))
    exchange = transfer_plan(dist, needs, tuple(shape), ghosts=True)
    ghosts = tuple(box[1:] for box in exchange.destinations)
    out = dist.box(None, out_shape)[2:]
    channels = Interval(0, shape[1]) if split is None else split.input_channels(dist.coordinate(1))
    owned = dist.box(None, shape)[1:]
    used = (channels.intersect(owned[0]), *owned[1:])
    return _ConvolutionPlan(
        exchange=exchange,
        local=Convolution(geometry, groups if split is None else split.local_groups, out, channels),
        owned=owned,
        used=used,
        ghosts=ghosts,
        needed=(channels, *(Interval(*geometry.needed(dim, outputs)) for dim, outputs in enumerate(out))),
        # A single call needs ghosts and owned block in one tensor.
        overlap=(
            not (single_call and ghosts)
            and used[0].extent > 0
            and is_convolvable_without_copy(owned[1:], out, geometry)
        ),
        single_call=single_call,
    )


class _Convolve(torch.autograd.Function):
    """Convolution by a plan, with the plan's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: _ConvolutionPlan
    ) -> torch.Tensor:
        y, saved = plan.forward(x, weight, bias)
        ctx.plan = plan
        ctx.save_for_backward(x, weight, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: _ConvolutionPlan = ctx.plan
        x, weight, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True: the gradients must have derivatives
            bias = weight.new_zeros(weight.shape[0], requires_grad=True)  # no gradient depends on its values
            inputs = (x, weight, bias)
            return (*differentiable_gradients(plan.differentiable_forward, inputs, wanted, grad), None)
        # The gradient of a sum is expanded: kernels and messages need it in memory.
        return (*plan.backward(dense(grad), x, weight, saved, wanted), None)


# -- helpers and registration -----------------------------------------------------------------------------------------


def _convolve_complex(
    convolve: Callable[..., DistTensor], x: DistTensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> DistTensor:
    """Return y from three real convolutions, as torch does: (a + ib)(c + id) needs ac, bd and (a + b)(c + d)."""
    ac, bd = convolve(x.real, weight.real), convolve(x.imag, weight.imag)
    both = convolve(x.real + x.imag, weight.real + weight.imag)
    y: DistTensor = pointwise(torch.complex, ac - bd, both - ac - bd)
    return y if bias is None else pointwise(torch.add, y, bias.reshape(-1, *(1,) * (weight.dim() - 2)))


def _padding_before(
    padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding before each dimension; the padding after it follows from the size of the output."""
    # With an odd total torch pads one more at the end.
    if padding == "same":
        return tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    if padding == "valid":
        return (0,) * len(kernel)
    assert not isinstance(padding, str)
    return to_tuple(padding, len(kernel))


_implements = partial(implements, order=StridePolicy.OF_LAYER, tensors="input weight bias")
_implements(torch.conv1d, F.conv1d)(partial(convolution, torch.conv1d))
_implements(torch.conv2d, F.conv2d)(partial(convolution, torch.conv2d))
_implements(torch.conv3d, F.conv3d)(partial(convolution, torch.conv3d))
