"""Batch normalization with statistics over samples and space.

One fused all-reduce forward (two for float64) and one backward. :mod:`distconv.batch_norm_scope` selects the values
over which statistics are computed. ``SyncBatchNorm`` is patched to use global statistics for distributed tensors.

Source: Dryden et al. 2019, III-B (local statistics, and statistics aggregated over the spatial distribution of a
sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch.nn.modules import batchnorm

from distconv import batch_norm_scope
from distconv.autograd import recomputation
from distconv.autograd.derivatives import differentiable_gradients
from distconv.communication.collectives import allreduce_sum, apply, with_grad_allreduce
from distconv.communication.transport import allreduce
from distconv.dispatch import StridePolicy, implements
from distconv.distribution import Interval
from distconv.errors import DtypeError, NoRule, ShapeError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.kernels.normalization import (
    BatchNormGradient,
    can_be_misread,
    copy_if_misread,
    normalize_differentiably,
    refine_moments,
)
from distconv.layers.common.alignment import redistribute_balanced, result_shape
from distconv.layers.common.empty_blocks import pad_to_minimum_shape, run_like_other_ranks
from distconv.layers.common.sharded_weights import parameter_blocks
from distconv.precision import accumulation_dtype
from distconv.process import patches
from distconv.tensor import DistTensor

_DIMENSIONS = {"global": (0, 2, 3, 4), "spatial": (2, 3, 4), "local": ()}
"""Dimensions of x over which statistics are computed, if they are split, for each scope."""


# -- operators --------------------------------------------------------------------------------------------------------


ORDER = StridePolicy.OF_INPUT_ON_CPU
"""The CPU's kernels return tensors that are contiguous or channels-last, where meta tensors keep any other order."""


@implements(F.batch_norm, order=ORDER, tensors="input running_mean running_var weight bias", passes=2)
def batch_norm(
    input: DistTensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Compute ``F.batch_norm`` of x (N, C, ...) with statistics that are all-reduced.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
        As in ``F.batch_norm``.

    Returns
    -------
    DistTensor

    Raises
    ------
    ShapeError
        If there is one value per channel in training, with torch's message.
    DtypeError
        If the weight's dtype does not match the input's.
    NoRule
        For a plain tensor with a distributed weight.
    """
    result_shape(F.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)
    if isinstance(running_mean, DistTensor) or isinstance(running_var, DistTensor):
        function = partial(batch_norm, input, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps)
        return _call_with_full_statistics((running_mean, running_var), function)
    if not isinstance(input, DistTensor):
        raise NoRule("batch norm of a plain tensor with a distributed weight: scatter the input first")
    if weight is not None and weight.dtype not in (input.dtype, accumulation_dtype(input.dtype)):
        raise DtypeError(f"batch norm of {input.dtype} with a weight of {weight.dtype}: convert the model or the input")
    # Within torch.utils.checkpoint they must be updated as often as in a single process.
    if training and running_mean is not None and recomputation.active:
        recomputation.check_statistics_update()
    if input.dim() < 2:
        norm = partial(F.batch_norm, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
        return _normalize_1d(input, partial(norm, training=training, momentum=momentum, eps=eps))
    channel_axis = input.dist.split[1]
    # Parameters that are split over channels have balanced blocks, so those of x must match them.
    x = input if channel_axis is None else redistribute_balanced(input)
    dist = x.dist
    dims = _DIMENSIONS[batch_norm_scope.current_scope()] if training else ()
    reduced = [dist.split[d] for d in dims if d < len(dist.split)]
    # Over these axes groups compute statistics of their own; gradients of weight and bias are summed over them
    # afterwards.
    rest = tuple(a for a in dist.split_axes if a not in reduced)
    w, b = parameter_blocks(weight, bias, dist, [1], rest)
    local = copy_if_misread(x.local)
    own = x.box()[1] if channel_axis else Interval(0, x.shape[1])
    channels = slice(own.start, own.stop)
    # Given statistics, or all values on this rank: torch's own kernel, without messages.
    if not training or not dist.split_axes or not input.numel():
        mean, var = (None if t is None else t[channels] for t in (running_mean, running_var))
        local_norm = partial(F.batch_norm, training=training, momentum=momentum, eps=eps)
        # A rank without channels computes one with two values, because torch requires two in training.
        if own.extent:
            y = local_norm(local, mean, var, w, b)
            if y.requires_grad and can_be_misread(y.shape):
                y.register_hook(copy_if_misread)
        else:
            values = pad_to_minimum_shape(local, (2, *(1,) * (local.dim() - 1)))
            y = run_like_other_ranks(local_norm, local.shape, values, mean, var, w, b)
        return DistTensor(y, dist, x.shape)
    domain = _plan_statistics(x, tuple(a for a in dist.split_axes if a not in rest), channels)
    running = (running_mean, running_var, momentum)
    return DistTensor(apply(_BatchNorm, local, w, b, running, eps, domain), dist, x.shape)


@implements(torch.batch_norm, order=ORDER, tensors="input weight bias running_mean running_var", passes=2)
def torch_batch_norm(
    input: DistTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> DistTensor:
    """Compute ``torch.batch_norm``, which takes the arguments of ``F.batch_norm`` in another order.

    Parameters
    ----------
    input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        As in ``torch.batch_norm``.

    Returns
    -------
    DistTensor
    """
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StatisticsDomain:
    """The values over which statistics are computed: ``count`` per channel, on the ranks along ``axes``."""

    count: int
    grid: ProcessGrid
    axes: tuple[str, ...]
    channels: slice
    """The channels of this rank."""
    all_channels: int
    """Number of all channels."""
    channel_axis: str | None
    """The axis that splits the channels."""
    running_comm: MPI.Intracomm | None
    """The ranks that share running statistics; None if all ranks have the same statistics."""
    fraction: float
    """This rank's fraction of all values of a channel."""


def _plan_statistics(x: DistTensor, axes: tuple[str, ...], channels: slice) -> _StatisticsDomain:
    """Return the values over which statistics are computed on the ranks along ``axes``. Collective at its first use."""
    dist, channel_axis = x.dist, x.dist.split[1]
    # Axes along which ranks compute statistics of other values, which must be averaged before they are stored.
    differs = bool({*dist.split_axes} - {*axes, channel_axis})
    running_comm = x.grid.comm(dist.split_axes) if differs else None
    local_values, values = (math.prod((shape[0], *shape[2:])) for shape in (x.local.shape, x.shape))
    return _StatisticsDomain(
        _values_per_channel(x, axes),
        x.grid,
        axes,
        channels,
        x.shape[1],
        channel_axis,
        running_comm,
        local_values / values,
    )


def _values_per_channel(x: DistTensor, axes: tuple[str, ...]) -> int:
    """Return the number of values per channel over which statistics along ``axes`` are computed on this rank."""
    shape, split = (*x.shape[:1], *x.shape[2:]), (*x.dist.split[:1], *x.dist.split[2:])
    if set(axes) == {axis for axis in split if axis}:
        return math.prod(shape)
    # The numbers of all ranks, so that all raise if one has too few.
    counts = []
    for rank in range(x.grid.size):
        local = x.dist.local_shape(x.shape, rank)
        block = (*local[:1], *local[2:])
        counts.append(math.prod(n if s in axes else m for n, m, s in zip(shape, block, split, strict=True)))
    if min(counts) < 2:
        raise ShapeError(
            f"batch norm with {batch_norm_scope.current_scope()} statistics: a rank has {min(counts)} values per "
            f"channel of {tuple(x.shape)} over {x.dist}. Use global statistics or fewer ranks."
        )
    return counts[x.grid.rank]


def _compute_moments(
    x: torch.Tensor, running: tuple[torch.Tensor | None, torch.Tensor | None, float], domain: _StatisticsDomain
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance per channel over all blocks of the domain, in float64. Collective.

    Sums are taken about the running mean, which is identical on these ranks and usually near the mean. For channels
    that this rank does not have, the result is valid only if there are running statistics, because every rank stores
    all of these.
    """
    own_channels = x.shape[1]
    # A rank without samples takes part in the all-reduce with zeros.
    count = x.numel() // max(1, own_channels)
    if count:
        wide = x.to(accumulation_dtype(x.dtype))
        # The two passes of batch norm's own kernel: on a CPU five times as fast as torch.var_mean, and as accurate.
        mean, var = torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)
    else:
        mean = var = x.new_zeros(own_channels)
    shift = running[0]
    # Moments about the running mean: E(x^2) - E(x)^2 would cancel if the mean is large against the deviation.
    origin = torch.zeros(domain.all_channels, dtype=torch.float64, device=x.device) if shift is None else shift.double()
    # Running statistics are replicated, so ranks with other channels need these sums, too: one all-reduce over both
    # axes.
    updates_all_channels = domain.running_comm is None and any(statistic is not None for statistic in running[:2])
    comm = domain.grid.comm(
        {*domain.axes, *([domain.channel_axis] if domain.channel_axis and updates_all_channels else [])}
    )

    def moments_about(origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # 1. Mean and variance of the block to its parts of the means of (x - origin) and (x - origin)^2.
        parts = torch.stack([mean, var]).double()
        offset, squares = parts.unbind()
        offset.sub_(origin if own_channels == domain.all_channels else origin[domain.channels])
        squares.addcmul_(offset, offset)
        parts.mul_(count / domain.count)
        # 2. The message has all channels, because ranks with other channels may be in the communicator.
        if own_channels < domain.all_channels:
            parts = F.pad(parts, (domain.channels.start, domain.all_channels - domain.channels.stop))
        offset, squares = allreduce(comm, parts, "batch norm forward").unbind()
        # 3. Back to mean and variance. Rounding may leave a small negative variance.
        squares.addcmul_(offset, offset, value=-1).clamp_(min=0)
        return offset.add_(origin), squares

    return refine_moments(moments_about, origin, x.dtype)


def _update_running(
    running: tuple[torch.Tensor | None, torch.Tensor | None, float],
    mean: torch.Tensor,
    var: torch.Tensor,
    domain: _StatisticsDomain,
) -> None:
    """Update the running statistics, or register an update that the scope applies later."""
    if running[0] is None and running[1] is None:
        return
    unbiased = var * (domain.count / (domain.count - 1))
    if domain.running_comm is None:
        for statistic, value in zip(running[:2], (mean, unbiased), strict=True):
            batch_norm_scope.update_running_statistic(statistic, value, running[2])
        return
    # Groups have other statistics. Deferred to the end of the forward pass, where one all-reduce sums those of all
    # layers.
    contributions = mean.new_zeros((2, domain.all_channels))
    contributions[:, domain.channels] = domain.fraction * torch.stack([mean, unbiased])[:, domain.channels]
    batch_norm_scope.defer_update(batch_norm_scope.StatisticsUpdate(domain.running_comm, contributions, *running))


# -- normalization ----------------------------------------------------------------------------------------------------


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor | None, torch.Tensor | None, float],
        eps: float,
        domain: _StatisticsDomain,
    ) -> torch.Tensor:
        mean, var = _compute_moments(x, running, domain)
        _update_running(running, mean, var, domain)
        # Never in half precision, which would lose almost all digits of a small variance.
        dtype = accumulation_dtype(x.dtype if weight is None else weight.dtype)
        if x.shape[1] < domain.all_channels:
            mean, var = mean[domain.channels], var[domain.channels]
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.domain = eps, domain
        # The statistics are given, so torch's fused kernel for evaluation normalizes.
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps) if x.numel() else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        needed, domain = ctx.needs_input_grad, ctx.domain
        # Second derivatives: the fused gradient below has no graph.
        if torch.is_grad_enabled():
            bias = torch.zeros_like(mean, requires_grad=True) if needed[2] else None
            gradients = differentiable_gradients(
                partial(_differentiable_forward, domain, ctx.eps), (x, weight, bias), needed[:3], grad
            )
            return *gradients, None, None, None
        gradient = BatchNormGradient(grad, x, weight, (mean, var), ctx.eps)
        allreduce(domain.grid.comm(domain.axes), gradient.sums, "batch norm backward")
        dx = gradient.input_gradient(domain.count) if needed[0] else None
        dw = gradient.sums[0] if weight is not None and needed[1] else None
        return dx, dw, (gradient.sums[1] if needed[2] else None), *(None,) * 3


def _differentiable_forward(
    domain: _StatisticsDomain, eps: float, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute batch normalization by operators that have derivatives of any order. Collective."""
    dims = [d for d in range(x.dim()) if d != 1]
    shape = (-1, *(1,) * (x.dim() - 2))

    def mean(values: torch.Tensor) -> torch.Tensor:
        total = allreduce_sum(values.sum(dims), domain.grid, domain.axes)
        return with_grad_allreduce(total / domain.count, domain.grid, domain.axes).view(shape)

    weight, bias = (
        None if t is None else with_grad_allreduce(t, domain.grid, domain.axes).view(shape) for t in (weight, bias)
    )
    return normalize_differentiably(x.to(accumulation_dtype(x.dtype)), mean, weight, bias, eps).to(x.dtype)


# -- special inputs ---------------------------------------------------------------------------------------------------


def _normalize_1d(x: DistTensor, norm: Callable[..., torch.Tensor]) -> DistTensor:
    """Compute the norm of x of one dimension, which torch accepts if it has no elements."""
    # Without elements, gathering costs nothing.
    full = x.replicated()
    return DistTensor(norm(full.local), full.dist, x.shape).redistribute(x.dist)


def _call_with_full_statistics(
    running: Sequence[torch.Tensor | None], function: Callable[..., DistTensor]
) -> DistTensor:
    """Call ``function`` with gathered running statistics, and write them back to their blocks. Collective.

    The blocks of running statistics may differ from the channel blocks of x.
    """
    full: list[Any] = [t.gather().detach() if isinstance(t, DistTensor) else t for t in running]
    y = function(*full)
    # Otherwise a deferred update would reach the gathered copies after they are written back.
    batch_norm_scope.apply_updates()
    with torch.no_grad():
        for statistic, values in zip(running, full, strict=True):
            if isinstance(statistic, DistTensor):
                statistic.copy_(values)
    return y


# -- SyncBatchNorm ----------------------------------------------------------------------------------------------------

_torch_forward = batchnorm.SyncBatchNorm.forward


@wraps(_torch_forward)
def _sync_batch_norm_forward(layer: batchnorm.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Run SyncBatchNorm on a distributed tensor as batch normalization with global statistics.

    ``torch.distributed`` is not used.
    """
    if not isinstance(input, DistTensor):
        return _torch_forward(layer, input)
    if layer.process_group is not None:
        raise UnsupportedOperation(
            "SyncBatchNorm: a process_group of torch.distributed is not supported. Leave it out for statistics over "
            "the "
            "global mini-batch, or use BatchNorm and parallelize(model, grid, batch_norm='spatial')."
        )
    layer._check_input_dim(input)
    with batch_norm_scope.global_statistics():
        return batchnorm._BatchNorm.forward(layer, input)


patches.declare(batchnorm.SyncBatchNorm, "forward", _sync_batch_norm_forward, "it calls torch.distributed")
