"""Group, instance, layer and RMS normalization.

::

    forward   [f1]  sums of each block
              [f2]  one all-reduce over the ranks that share a group
              [f3]  normalize the block

    backward  [b1]  sums of the block's gradient
              [b2]  one all-reduce over the same ranks
              [b3]  dL/dx of the block

For float64, [f1] and [f2] are repeated with sums about the mean. Groups may cross the borders of blocks, in space and
in channels.

Source: Dryden et al. 2019, III-B (statistics aggregated over the spatial distribution of a sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.autograd import recomputation
from distconv.autograd.derivatives import differentiable_gradients
from distconv.communication.collectives import allreduce_sum, apply, with_grad_allreduce
from distconv.communication.transport import allreduce
from distconv.dispatch import StridePolicy, implements
from distconv.errors import DtypeError, NoRule
from distconv.grid import ProcessGrid
from distconv.kernels.normalization import (
    gradient_sums,
    input_gradient,
    normalize_differentiably,
    refine_moments,
)
from distconv.layers.common.alignment import redistribute_balanced, result_shape, to_probed_dtype
from distconv.layers.common.sharded_weights import parameter_block, parameter_blocks
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor

Observer = Callable[[torch.Tensor, torch.Tensor], None]
"""Receives mean and variance (rows, groups) of the groups that this rank normalizes."""


# -- operators --------------------------------------------------------------------------------------------------------


@implements(F.group_norm, torch.group_norm, order=StridePolicy.OF_INPUT, tensors="input weight bias", passes=2)
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> DistTensor:
    """Compute ``F.group_norm`` of x (N, C, ...); sums are all-reduced over the ranks that share a group.

    Parameters
    ----------
    input, num_groups, weight, bias, eps, cudnn_enabled
        As in ``F.group_norm``.

    Returns
    -------
    DistTensor
    """
    result_shape(F.group_norm, input, num_groups, weight, bias, eps)
    x = _prepare_input(input, weight, bias, "group norm", lambda block: F.group_norm(block, 1))
    return _normalize_channel_groups(x, num_groups, (weight, bias), eps)


@implements(F.instance_norm, tensors="input running_mean running_var weight bias", passes=2)
def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Compute ``F.instance_norm`` of x (N, C, ...); running statistics are means over the global mini-batch.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        As in ``F.instance_norm``.

    Returns
    -------
    DistTensor
    """
    result_shape(F.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    x = _prepare_input(input, weight, bias, "instance norm", F.instance_norm)
    if not use_input_stats:
        assert running_mean is not None and running_var is not None  # result_shape rejects None.
        return _normalize_with_statistics(x, running_mean, running_var, weight, bias, eps)
    if running_mean is None and running_var is None:
        return _normalize_channel_groups(x, x.shape[1], (weight, bias), eps)
    moments: list[torch.Tensor] = []
    y = _normalize_channel_groups(x, x.shape[1], (weight, bias), eps, lambda *observed: moments.extend(observed))
    # As in torch, a recomputation that has all saved tensors ends here, before the statistics are updated again.
    recomputation.count_substep()
    recomputation.check_statistics_update()
    _update_running(x, running_mean, running_var, momentum, *moments)
    return y


@implements(torch.instance_norm, tensors=None, passes=2)
def torch_instance_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *options: Any,
) -> DistTensor:
    """Compute ``torch.instance_norm``, which takes the arguments of ``F.instance_norm`` in another order.

    Parameters
    ----------
    input, weight, bias, running_mean, running_var, *options
        As in ``torch.instance_norm``.

    Returns
    -------
    DistTensor
    """
    return instance_norm(input, running_mean, running_var, weight, bias, *options[:3])


@implements(F.layer_norm, torch.layer_norm, tensors="input weight bias", passes=2)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> DistTensor:
    """Compute ``F.layer_norm`` over the last dimensions, which may be split.

    Parameters
    ----------
    input, normalized_shape, weight, bias, eps, cudnn_enable
        As in ``F.layer_norm``.

    Returns
    -------
    DistTensor
    """
    result_shape(F.layer_norm, input, tuple(normalized_shape), weight, bias, eps)
    x = _prepare_input(input, weight, bias, "layer norm", lambda block: F.layer_norm(block, (2,)))
    first = x.dim() - len(normalized_shape)
    w, b = parameter_blocks(weight, bias, x.dist, range(first, x.dim()))
    axes = x.grid.split_axes(x.dist.split[first:])
    if not axes:
        y = torch.layer_norm(x.local, normalized_shape, w, b, eps, torch.backends.cudnn.enabled)
        return DistTensor(y, x.dist, x.shape)
    # A row is one group of one part. Weight and bias have a value for each element, and not for each part, so they are
    # applied afterwards.
    rows, elements = math.prod(x.local.shape[:first]), math.prod(x.local.shape[first:])
    groups = _Groups((rows, 1, elements), 0, 1, 1, math.prod(normalized_shape), x.grid, axes)
    y = apply(_Normalize, x.local, None, None, groups, eps, _to_accumulation_dtype(x.local[:0]).dtype, None)
    return DistTensor(_scale_and_shift(y, w, b).to(x.dtype), x.dist, x.shape)


@implements(F.rms_norm, torch.rms_norm, tensors="input weight", passes=2)
def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> DistTensor:
    """Compute ``F.rms_norm`` over the last dimensions, which may be split.

    Parameters
    ----------
    input, normalized_shape, weight, eps
        As in ``F.rms_norm``.

    Returns
    -------
    DistTensor
    """
    result_shape(F.rms_norm, input, tuple(normalized_shape), weight, eps)
    x = _prepare_input(input, weight, None, "RMS norm", lambda block: F.rms_norm(block, (2,)))
    dims = range(x.dim() - len(normalized_shape), x.dim())
    w = None if weight is None else parameter_block(weight, x.dist, dims)
    wide = _to_accumulation_dtype(x.local)
    axes = [x.dist.split[d] for d in dims]
    # The sum is replicated, but each rank's elements depend on it: its gradient is all-reduced, too (`scale`).
    squares = allreduce_sum((wide * wide).sum(list(dims), keepdim=True), x.grid, axes)
    epsilon = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = with_grad_allreduce((squares / math.prod(normalized_shape) + epsilon).rsqrt(), x.grid, axes)
    return DistTensor(_scale_and_shift(wide * scale, w, None).to(x.dtype), x.dist, x.shape)


# -- preparation ------------------------------------------------------------------------------------------------------


def _prepare_input(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    name: str,
    probe: Callable[[torch.Tensor], torch.Tensor],
) -> DistTensor:
    """Return the input without block-cyclic dimensions, in the dtype that autocast selects. Collective.

    Raises
    ------
    NoRule
        If the input is a plain tensor.
    DtypeError
        If the parameters' dtype does not match the input's.
    """
    if not isinstance(input, DistTensor):
        raise NoRule(f"{name} of a plain tensor with distributed parameters: scatter the input first")
    x = redistribute_balanced(input) if input.dist.cyclic else input
    x = to_probed_dtype(x, probe, 1, 1, 2)
    dtypes = {p.dtype for p in (weight, bias) if p is not None}
    if len(dtypes) > 1 or not dtypes <= {x.dtype, accumulation_dtype(x.dtype)}:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise DtypeError(f"{name} of {x.dtype} with parameters of {listed}: convert the model or the input")
    return x


def _normalize_channel_groups(
    x: DistTensor,
    number: int,
    parameters: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    observe: Observer | None = None,
) -> DistTensor:
    """Normalize ``number`` groups of channels of each sample."""
    weight, bias = parameter_blocks(*parameters, x.dist, [1])
    size, split = x.shape[1] // number, x.dist.split
    axes = x.grid.split_axes(split[2:] if size == 1 else split[1:])
    samples, channels = x.local.shape[:2]
    # All of each group on this rank: torch's own kernel. It does not report the statistics.
    if not axes and observe is None and x.local.numel():
        y = torch.group_norm(x.local, channels // size, weight, bias, eps, torch.backends.cudnn.enabled)
        return DistTensor(y, x.dist, x.shape)
    groups = _Groups(
        shape=(samples, channels, math.prod(x.local.shape[2:])),
        first=0 if size == 1 else x.box()[1].start,
        size=size,
        number=channels if size == 1 else number,
        count=size * math.prod(x.shape[2:]),
        grid=x.grid,
        axes=axes,
    )
    y = apply(_Normalize, x.local, weight, bias, groups, eps, x.dtype, observe)
    return DistTensor(y, x.dist, x.shape)


def _normalize_with_statistics(
    x: DistTensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> DistTensor:
    """Normalize with given statistics (C,)."""
    mean, var = (parameter_block(t, x.dist, [1]) for t in (mean, var))
    weight, bias = parameter_blocks(weight, bias, x.dist, [1])
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return DistTensor(torch.addcmul(shift.view(shape), x.local, scale.view(shape)).to(x.dtype), x.dist, x.shape)


def _update_running(
    x: DistTensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    mean: torch.Tensor,
    var: torch.Tensor,
) -> None:
    """Update running statistics (C,) by the mean of ``mean`` and ``var`` over all samples. Collective.

    ``mean`` and ``var`` are those of this rank's samples and channels.
    """
    count = math.prod(x.shape[2:])
    channels = x.box()[1]
    total = mean.new_zeros((2, x.shape[1]))
    total[0, channels.start : channels.stop] = mean.sum(0)
    total[1, channels.start : channels.stop] = var.sum(0) * (count / (count - 1))
    # Over samples and channels only: ranks along space have the same statistics, which must not be added.
    allreduce(x.grid.comm(x.grid.split_axes(x.dist.split[:2])), total, "instance norm running statistics")
    for running, value in zip((running_mean, running_var), total / x.shape[0], strict=True):
        if running is not None:
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _scale_and_shift(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# -- groups and their statistics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Groups:
    """The groups of a block that is viewed as (rows, parts, elements).

    Part ``i`` belongs to group ``(first + i) // size`` of its row. A group has ``count`` elements on all ranks along
    ``axes``.
    """

    shape: tuple[int, int, int]
    """Shape (rows, parts, elements) of the block."""
    first: int
    """Index of the block's first part among the parts of all ranks; 0 if a group is one part."""
    size: int
    """Parts of a group."""
    number: int
    """Groups of a row on all ranks; if a group is one part, only those of this rank's block."""
    count: int
    """Elements of a group on all ranks along ``axes``."""
    grid: ProcessGrid
    axes: tuple[str, ...]
    """Axes along which ranks share a group."""

    def group_of_parts(self, device: torch.device) -> torch.Tensor:
        """Return the group of each part."""
        return (torch.arange(self.shape[1], device=device) + self.first) // self.size

    def allreduce_group_sums(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return sums per group (k, rows, groups) over all ranks of ``values`` (k, rows, parts). Collective."""
        total = values.new_zeros((values.shape[0], self.shape[0], self.number))
        total.index_add_(2, self.group_of_parts(values.device), values)
        # Without axes only ranks with an empty block reach this line. They must not create a communicator, which is
        # collective.
        return allreduce(self.grid.comm(self.axes), total, what) if self.axes else total

    def as_single_sample(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with each part of each row as a channel of one sample, as torch's batch norm kernels require."""
        return _to_accumulation_dtype(x).reshape(1, self.shape[0] * self.shape[1], self.shape[2])

    def repeat_for_parts(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return values (rows, groups) repeated for each part of each row."""
        return values.to(dtype)[:, self.group_of_parts(values.device)].flatten()

    def moments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and biased variance (rows, groups) in float64 of the block ``x``. Collective."""
        var = mean = torch.zeros(self.shape[:2], dtype=torch.float64, device=x.device)
        if x.numel():
            var, mean = torch.var_mean(_to_accumulation_dtype(x).reshape(self.shape), 2, correction=0)
        parts = self.group_of_parts(x.device)

        def moments_about(origin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Sums of (x - origin) and (x - origin)^2 add up over parts and ranks; means and variances do not.
            offset = mean.double() - origin[:, parts]
            sums = self.allreduce_group_sums(
                self.shape[2] * torch.stack([offset, var + offset * offset]), "group norm forward"
            )
            offset = sums[0] / self.count
            return origin + offset, (sums[1] / self.count - offset * offset).clamp_(min=0)

        origin = torch.zeros((self.shape[0], self.number), dtype=torch.float64, device=x.device)
        return refine_moments(moments_about, origin, x.dtype)


def _to_accumulation_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulation_dtype(x.dtype))


# -- normalization ----------------------------------------------------------------------------------------------------


class _Normalize(torch.autograd.Function):
    """Normalization of each group, followed by scale and shift and converted to ``dtype``.

    Weight and bias have one value for each part, or are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        groups: _Groups,
        eps: float,
        dtype: torch.dtype,
        observe: Observer | None,
    ) -> torch.Tensor:
        mean, var = groups.moments(x)  # [f1], [f2]
        if observe is not None:
            observe(mean, var)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.groups, ctx.eps = groups, eps
        ctx.bias = None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x, dtype=dtype)
        flat = groups.as_single_sample(x)
        mean, var = groups.repeat_for_parts(mean, flat.dtype), groups.repeat_for_parts(var, flat.dtype)
        w, b = (None if t is None else t.to(flat.dtype).repeat(groups.shape[0]) for t in (weight, bias))
        # The statistics are given, so torch's fused kernel for evaluation normalizes. F.batch_norm rejects a negative
        # eps, which torch.batch_norm accepts.
        y = torch.batch_norm(flat, w, b, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)  # [f3]
        # Not a view: autograd forbids in-place changes of views that a Function returns.
        result: torch.Tensor = torch.ops.aten._unsafe_view(y, x.shape)
        return result.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        groups: _Groups = ctx.groups
        if torch.is_grad_enabled():
            bias = None
            if ctx.needs_input_grad[2]:
                bias = x.new_zeros(groups.shape[1], dtype=ctx.bias, requires_grad=True)
            forward = partial(_differentiable_forward, groups, ctx.eps, grad.dtype)
            return *differentiable_gradients(forward, (x, weight, bias), ctx.needs_input_grad[:3], grad), *(None,) * 4
        flat, wide = groups.as_single_sample(x), groups.as_single_sample(grad)
        factor = torch.ones((), device=x.device) if weight is None else weight
        mean, var = groups.repeat_for_parts(mean, flat.dtype), groups.repeat_for_parts(var, flat.dtype)
        sums, scale = flat.new_zeros((2, *groups.shape[:2])), (var + ctx.eps).rsqrt()
        if x.numel():
            sums = gradient_sums(wide, flat, (mean, var), scale, ctx.eps).view(sums.shape)  # [b1]
        dx = None
        if ctx.needs_input_grad[0]:
            # Channels of a group have other weights, so these belong into the sums.
            means = groups.allreduce_group_sums(sums * factor, "group norm backward") / groups.count  # [b2]
            slope, level = (
                groups.repeat_for_parts(means[0], flat.dtype),
                groups.repeat_for_parts(means[1], flat.dtype),
            )
            repeated = factor.to(flat.dtype).expand(groups.shape[1]).repeat(groups.shape[0])
            line = (mean, slope * scale * scale, level * scale)
            dx = input_gradient(wide, flat, repeated * scale, line).view(x.shape).to(x.dtype)  # [b3]
        dw, db = (s.sum(0) if w else None for s, w in zip(sums, ctx.needs_input_grad[1:3], strict=True))
        return dx, dw, db, None, None, None, None


def _differentiable_forward(
    groups: _Groups,
    eps: float,
    dtype: torch.dtype,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the normalization by operators that have derivatives of any order. Collective."""
    parts = groups.group_of_parts(x.device)

    def mean(values: torch.Tensor) -> torch.Tensor:
        sums = values.new_zeros((groups.shape[0], groups.number)).index_add(1, parts, values.sum(2))
        means = allreduce_sum(sums, groups.grid, groups.axes) / groups.count
        return with_grad_allreduce(means, groups.grid, groups.axes)[:, parts].unsqueeze(2)

    weight, bias = (None if t is None else t.unsqueeze(1) for t in (weight, bias))
    return (
        normalize_differentiably(_to_accumulation_dtype(x).reshape(groups.shape), mean, weight, bias, eps)
        .reshape(x.shape)
        .to(dtype)
    )
