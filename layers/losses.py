"""Losses: each rank sums over its block, one sum over the ranks gives the mean over the global mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.dispatch import implements
from distconv.errors import LabelError, UnsupportedOperation
from distconv.functions import sum_over
from distconv.grid import ProcessGrid
from distconv.layers.alignment import as_distributed, check_as_torch, result_shape
from distconv.layers.elementwise import pointwise
from distconv.layers.reductions import mean, sum
from distconv.tensor import DistTensor
from distconv.transport import allreduce


def _reduced(losses: DistTensor, reduction: str) -> DistTensor:
    if reduction == "none":
        return losses
    return mean(losses) if reduction == "mean" else sum(losses)


def _elementwise_loss(function: Callable[..., torch.Tensor], *operands: Any, **options: Any) -> DistTensor:
    """A loss that is an elementwise function of its operands, then reduced."""
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise UnsupportedOperation(f"{function.__name__} with size_average= or reduce=: use reduction=")
    reduction = options.pop("reduction", "mean")
    result_shape(function, *operands, **options, reduction=reduction)
    return _reduced(pointwise(partial(function, reduction="none"), *operands, **options), reduction)


@implements(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> DistTensor:
    """``F.binary_cross_entropy_with_logits``."""
    options = {"weight": weight, "pos_weight": pos_weight, "size_average": size_average, "reduce": reduce}
    return _elementwise_loss(F.binary_cross_entropy_with_logits, input, target, reduction=reduction, **options)


@implements(F.binary_cross_entropy)
def binary_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> DistTensor:
    """``F.binary_cross_entropy``."""
    options = {"weight": weight, "size_average": size_average, "reduce": reduce}
    return _elementwise_loss(F.binary_cross_entropy, input, target, reduction=reduction, **options)


def _two_operand_loss(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> DistTensor:
    if options.get("weight") is None:
        options.pop("weight", None)
    options |= {"size_average": size_average, "reduce": reduce}
    return _elementwise_loss(function, input, target, reduction=reduction, **options)


for _loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    implements(_loss)(partial(_two_operand_loss, _loss))


@implements(F.cross_entropy)
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DistTensor:
    """``F.cross_entropy`` of logits (N, C, ...) and class indices (N, ...) or probabilities (N, C, ...)."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _class_loss(F.cross_entropy, input, target, weight, size_average, reduce, reduction, options)


@implements(F.nll_loss)
def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> DistTensor:
    """``F.nll_loss`` of log-probabilities (N, C, ...) and class indices (N, ...)."""
    return _class_loss(
        F.nll_loss, input, target, weight, size_average, reduce, reduction, {"ignore_index": ignore_index}
    )


def _class_loss(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    size_average: Any,
    reduce: Any,
    reduction: str,
    options: dict[str, Any],
) -> DistTensor:
    """The sum over the global mini-batch, divided by the global sum of the weights that torch divides by."""
    if size_average is not None or reduce is not None:
        raise UnsupportedOperation(f"{function.__name__} with size_average= or reduce=: use reduction=")
    shape = result_shape(function, input, target, weight, reduction=reduction, **options)
    grid = (input if isinstance(input, DistTensor) else target).grid  # type: ignore[attr-defined]
    if input.dim() < 2:
        raise UnsupportedOperation(
            f"{function.__name__} of one sample without a sample dimension: add it (unsqueeze(0))"
        )
    indices = not (target.is_floating_point() or target.dim() == input.dim())
    if indices and target.shape != (input.shape[0], *input.shape[2:]):
        check_as_torch(function, input, target, weight)
    logits = as_distributed(input, grid)
    if not isinstance(input, DistTensor) and isinstance(target, DistTensor):
        axes = target.dist.axes
        logits = logits.redistribute(target.dist.with_axes([axes[0], None, *axes[1:]] if indices else axes))
    logits = logits.replicated([1])
    kept = [a for d, a in enumerate(logits.dist.axes) if d != 1]
    wanted = logits.dist.with_axes(kept if indices else logits.dist.axes)
    labels = as_distributed(target, grid).redistribute(wanted).local
    class_weight = None if weight is None else as_distributed(weight, grid).replicated().local.detach()
    if indices:
        _check_labels(labels, input.shape[1], options["ignore_index"], grid)
    losses = _local_losses(function, logits.local, labels, class_weight, options)
    if reduction == "none":
        return DistTensor(losses, logits.dist.with_axes(kept), shape)
    parts = torch.stack([losses.sum(), _divisor(labels, class_weight, options["ignore_index"], indices, losses)])
    total = sum_over(parts, grid, logits.dist.split_axes)
    result = total[0] if reduction == "sum" else total[0] / total[1]
    return DistTensor(result, logits.dist.with_axes(()), shape)


def _check_labels(labels: torch.Tensor, classes: int, ignore_index: int, grid: ProcessGrid) -> None:
    """Raise LabelError on all ranks if any of them has a label outside the classes; on a GPU torch asserts it."""
    if labels.is_cuda:
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
    found = torch.tensor([wrong.numel(), int(wrong[0]) if wrong.numel() else -(1 << 62)])
    count, example = allreduce(grid.world, found, "check of labels", MPI.MAX).tolist()
    if count:
        raise LabelError(f"Target {example} is out of bounds: the logits have {classes} classes, 0 to {classes - 1}")


def _local_losses(
    function: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    if logits.numel() == 0:
        return logits.sum(1)
    return function(logits, labels, weight, reduction="none", **options)


def _divisor(
    labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, indices: bool, losses: torch.Tensor
) -> torch.Tensor:
    """What a mean divides by here: samples, less the ignored ones, or the sum of their classes' weights."""
    if not indices:
        return torch.tensor(float(losses.numel()), dtype=losses.dtype, device=losses.device)
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().to(losses.dtype)
    return weight[labels[valid]].sum().to(losses.dtype)
