"""Losses: local sums and one all-reduce.

Each rank sums over its block. One all-reduce gives the mean over the global mini-batch, not the mean of the ranks'
means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.communication.collectives import allreduce_sum
from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.errors import LabelError, NoRule
from distconv.layers.common.alignment import (
    all_to_all_transpose,
    as_distributed,
    check_on_zeros,
    first_grid,
    replicate_parameter,
    result_shape,
    to_probed_dtype,
)
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape, run_like_other_ranks
from distconv.layers.common.value_check import call_or_raise_on_all_ranks, check_indices
from distconv.layers.math.pointwise import pointwise
from distconv.memory_format import memory_format
from distconv.tensor import DistTensor

_LEAST_ROW = 8
"""Number of classes from which softmax of a row is fast: a vector of float32. Of 2 classes it takes 3 times as long."""


def _reduce(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _check_old_options(function: Callable[..., torch.Tensor], size_average: Any, reduce: Any) -> None:
    if size_average is not None or reduce is not None:
        raise NoRule(f"{function.__name__} with size_average= or reduce=: use reduction=")


def _elementwise_loss(function: Callable[..., torch.Tensor], *operands: Any, **options: Any) -> torch.Tensor:
    """Compute a loss that is an elementwise function of its operands, then reduced."""
    _check_old_options(function, options.pop("size_average", None), options.pop("reduce", None))
    reduction = options.pop("reduction", "mean")
    result_shape(function, *operands, **options, reduction=reduction)
    return _reduce(pointwise(partial(function, reduction="none"), *operands, **options), reduction)


@implements(F.binary_cross_entropy_with_logits, tensors="input target weight pos_weight")
def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``F.binary_cross_entropy_with_logits`` element by element, then reduce.

    Parameters
    ----------
    input, target, weight, size_average, reduce, reduction, pos_weight
        As in ``F.binary_cross_entropy_with_logits``.

    Returns
    -------
    Tensor
    """
    options = {"weight": weight, "pos_weight": pos_weight, "size_average": size_average, "reduce": reduce}
    return _elementwise_loss(F.binary_cross_entropy_with_logits, input, target, reduction=reduction, **options)


@implements(F.binary_cross_entropy, tensors="input target weight")
def binary_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.binary_cross_entropy`` element by element, then reduce.

    Parameters
    ----------
    input, target, weight, size_average, reduce, reduction
        As in ``F.binary_cross_entropy``.

    Returns
    -------
    Tensor
    """
    options = {"weight": weight, "size_average": size_average, "reduce": reduce}
    return _elementwise_loss(F.binary_cross_entropy, input, target, reduction=reduction, **options)


def _unweighted_loss(function: Callable[..., torch.Tensor], *operands: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute a loss of two or three operands; recent versions of torch pass a weight, which may be None."""
    if options.get("weight") is None:
        options.pop("weight", None)
    return _elementwise_loss(function, *operands, **options)


for _loss in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.poisson_nll_loss,
    F.hinge_embedding_loss, F.margin_ranking_loss,
):  # fmt: skip
    implements(_loss, tensors=None)(partial(_unweighted_loss, _loss))


@implements(F.kl_div, tensors="input target")
def kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> torch.Tensor:
    """Compute ``F.kl_div`` element by element, then reduce.

    Parameters
    ----------
    input, target, size_average, reduce, reduction, log_target
        As in ``F.kl_div``.

    Returns
    -------
    Tensor
    """
    by_sample = reduction == "batchmean"
    options = {"size_average": size_average, "reduce": reduce, "log_target": log_target}
    loss = _elementwise_loss(F.kl_div, input, target, reduction="sum" if by_sample else reduction, **options)
    return loss / input.shape[0] if by_sample else loss


# -- losses that are made of other operators, as in torch -------------------------------------------------------------


@implements(F.cosine_embedding_loss, tensors="input1 input2 target")
def cosine_embedding_loss(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.cosine_embedding_loss`` of (N, D), or of (D,) with a target without dimensions.

    Parameters
    ----------
    input1, input2, target, margin, size_average, reduce, reduction
        As in ``F.cosine_embedding_loss``.

    Returns
    -------
    Tensor
    """
    _check_old_options(F.cosine_embedding_loss, size_average, reduce)
    result_shape(F.cosine_embedding_loss, input1, input2, target, margin, reduction=reduction)
    one = torch.zeros((1, 1), dtype=input1.dtype, device=input1.device)
    dtype = F.cosine_embedding_loss(one, one, one[0]).dtype  # another one under torch.autocast
    input1, input2 = input1.to(dtype), input2.to(dtype)
    # torch's constant. It prevents a division by zero.
    first, second = ((t * t).sum(dim=-1) + 1e-12 for t in (input1, input2))
    cosine = (input1 * input2).sum(dim=-1) / (first * second).sqrt()
    zero = torch.zeros_like(cosine)
    positive = torch.where(target == 1, 1 - cosine, zero)
    return _reduce(positive + torch.where(target == -1, (cosine - margin).clamp_min(0), zero), reduction)


@implements(F.triplet_margin_loss, tensors="anchor positive negative")
def triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.triplet_margin_loss`` by ``F.triplet_margin_with_distance_loss``, which torch writes in Python.

    Parameters
    ----------
    anchor, positive, negative, margin, p, eps, swap, size_average, reduce, reduction
        As in ``F.triplet_margin_loss``.

    Returns
    -------
    Tensor
    """
    _check_old_options(F.triplet_margin_loss, size_average, reduce)
    distance = partial(F.pairwise_distance, p=p, eps=eps)
    return F.triplet_margin_with_distance_loss(
        anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=reduction
    )


# -- losses of classes ------------------------------------------------------------------------------------------------


@implements(F.cross_entropy, tensors="input target weight")
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute ``F.cross_entropy`` of logits (N, C, ...) and class indices (N, ...) or probabilities (N, C, ...).

    Split classes are gathered.

    Parameters
    ----------
    input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        As in ``F.cross_entropy``.

    Returns
    -------
    Tensor
    """
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _class_loss(F.cross_entropy, input, target, weight, size_average, reduce, reduction, options)


@implements(F.nll_loss, tensors="input target weight")
def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.nll_loss`` of log-probabilities (N, C, ...) and class indices (N, ...).

    Split classes are gathered.

    Parameters
    ----------
    input, target, weight, size_average, ignore_index, reduce, reduction
        As in ``F.nll_loss``.

    Returns
    -------
    Tensor
    """
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
) -> torch.Tensor:
    """Compute a loss of classes: a sum over the global mini-batch, divided by a global sum of weights."""
    _check_old_options(function, size_average, reduce)
    shape = result_shape(function, input, target, weight, reduction=reduction, **options)
    if input.dim() == 1:
        options |= {"size_average": None, "reduce": None, "weight": weight, "reduction": reduction}
        loss = function(input.unsqueeze(0), target.unsqueeze(0), **options)
        return loss.squeeze(0) if reduction == "none" else loss
    grid = (input if isinstance(input, DistTensor) else target).grid  # type: ignore[attr-defined]
    indices = not (target.is_floating_point() or target.dim() == input.dim())
    # The meta implementation does not compare all of these sizes.
    if indices and target.shape != (input.shape[0], *input.shape[2:]):
        check_on_zeros(function, input, target, weight)
    logits = as_distributed(input, grid)
    # Plain logits follow the labels: otherwise these would be gathered, and every rank would compute all losses.
    if not isinstance(input, DistTensor) and isinstance(target, DistTensor):
        axes = target.dist.axes
        logits = logits.redistribute(target.dist.with_axes([axes[0], None, *axes[1:]] if indices else axes))
    logits = to_probed_dtype(logits.replicated([1]), lambda block: function(block, block[:, 0].long()), 1, 1)
    sample_axes = [a for d, a in enumerate(logits.dist.axes) if d != 1]
    target_dist = logits.dist.with_axes(sample_axes if indices else logits.dist.axes)
    labels = as_distributed(target, grid).redistribute(target_dist).local
    class_weight = None if weight is None else as_distributed(weight, grid).replicated().local.detach()
    if indices:
        classes = input.shape[1]

        def label_error(label: int) -> LabelError:
            return LabelError(f"Target {label} is out of bounds: the logits have {classes} classes, 0 to {classes - 1}")

        check_indices(labels, classes, grid, label_error, options["ignore_index"])
    local_losses = partial(_losses_of_block, partial(function, weight=class_weight, reduction="none", **options))
    local_shape = (*logits.local.shape[:1], *logits.local.shape[2:])
    losses = run_like_other_ranks(local_losses, local_shape, logits.local, labels)
    if reduction == "none":
        return DistTensor(losses, logits.dist.with_axes(sample_axes), shape)
    # In half precision both the sum and the count could overflow or be rounded.
    wide = torch.promote_types(losses.dtype, torch.float32)
    divisor = _mean_divisor(labels, class_weight, options["ignore_index"], indices, losses).to(wide)
    # Sum and divisor in one message. Each rank divides the same numbers, so the loss is identical on all ranks.
    total = allreduce_sum(torch.stack([losses.sum(dtype=wide), divisor]), grid, logits.dist.split_axes)
    result = total[0] if reduction == "sum" else total[0] / total[1]
    return DistTensor(result.to(losses.dtype), logits.dist.with_axes(()), shape)


def _losses_of_block(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each position.

    torch copies channels_last logits to contiguous memory and back. A row for each position is a view of them.
    """
    classes, indices = logits.shape[1], labels.dim() < logits.dim()
    if not indices or classes < _LEAST_ROW or memory_format(logits) is torch.contiguous_format:
        return function(logits, labels)
    return function(logits.movedim(1, -1).flatten(0, -2), labels.flatten()).view(labels.shape)


def _mean_divisor(
    labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, indices: bool, losses: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of the divisor of a mean: the valid labels, or the sum of their classes' weights."""
    if not indices:
        return torch.tensor(losses.numel(), device=losses.device)
    valid = labels != ignore_index
    if weight is None:
        return valid.sum()
    # Ignored labels may be outside the range of classes, so they look up class 0 first.
    return weight[labels.where(valid, 0)].where(valid, 0).sum()


# -- losses with one value for each sample ----------------------------------------------------------------------------


def _margin_loss(
    function: Callable[..., torch.Tensor], input: torch.Tensor, target: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    """Compute ``F.multi_margin_loss`` or ``F.multilabel_margin_loss`` of x (N, C)."""
    _check_old_options(function, named.pop("size_average", None), named.pop("reduce", None))
    reduction = named.pop("reduction", "mean")
    shape = result_shape(function, input, target, *args, reduction="none", **named)
    if args or input.dim() != 2:
        raise NoRule(
            f"{function.__name__} of one sample, or with positional options, has no distributed rule: pass a batch, "
            "and options by name"
        )
    x = as_distributed(input, first_grid(input, target)).replicated([1])
    dist = x.dist.with_axes(x.dist.axes[:1])
    labels = as_distributed(target, x.grid).redistribute(dist.with_axes((*dist.axes, *(None,) * (target.dim() - 1))))
    options = {name: replicate_parameter(v, dist) if isinstance(v, torch.Tensor) else v for name, v in named.items()}
    losses = partial(run_like_other_ranks, partial(function, reduction="none", **options), dist.local_shape(shape))
    return _reduce(
        DistTensor(call_or_raise_on_all_ranks(x.grid, losses, x.local, labels.local), dist, shape), reduction
    )


for _of_classes in (F.multi_margin_loss, F.multilabel_margin_loss):
    implements(_of_classes, tensors=None)(partial(_margin_loss, _of_classes))


@implements(F.ctc_loss, tensors=None)
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute ``F.ctc_loss`` of log probabilities (T, N, C) and targets (N, S), split over samples.

    Parameters
    ----------
    log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        As in ``F.ctc_loss``.

    Returns
    -------
    Tensor

    Raises
    ------
    NoRule
        For one sample, and for concatenated targets.
    """
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise NoRule(
            "F.ctc_loss of one sample, or of concatenated targets, has no distributed rule: pad the targets to (N, S)"
        )
    x = all_to_all_transpose(
        as_distributed(log_probs, first_grid(log_probs, targets, input_lengths, target_lengths)), [0, 2]
    )
    samples = x.shape[1]
    dist = x.dist.with_axes((x.dist.axes[1],))
    labels = as_distributed(targets, x.grid).redistribute(dist.with_axes((*dist.axes, None))).local
    lengths = [_lengths(each, dist, samples) for each in (input_lengths, target_lengths)]

    def losses() -> torch.Tensor:
        if x.local.shape[1]:
            return F.ctc_loss(x.local, labels, lengths[0].local, lengths[1].local, blank, "none", zero_infinity)
        # A rank without samples computes one sample without labels, so that its graph is that of the other ranks.
        none = torch.zeros(1, dtype=torch.int64)
        one = pad_to_minimum_shape(x.local, (1, 1, 1))
        return connected_zeros(
            F.ctc_loss(one, pad_to_minimum_shape(labels, (1, 1)), none + len(one), none, blank, "none"), (0,)
        )

    # torch checks lengths and labels by values, which differ between ranks.
    result: torch.Tensor = DistTensor(call_or_raise_on_all_ranks(x.grid, losses), dist, torch.Size((samples,)))
    return _reduce(result / lengths[1].clamp(min=1) if reduction == "mean" else result, reduction)


def _lengths(lengths: Any, dist: Distribution, samples: int) -> DistTensor:
    """Return the lengths of the samples, distributed as the samples are."""
    values = lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    if values.shape != (samples,):
        raise NoRule(f"F.ctc_loss of {samples} samples with lengths {tuple(values.shape)}: pass one for each sample")
    return as_distributed(values.long(), dist.grid).redistribute(dist)


# -- functions of torch that encode the reduction as a number ---------------------------------------------------------

_NUMBERED_REDUCTIONS = {
    "kl_div": "input target reduction log_target",
    "binary_cross_entropy_with_logits": "input target weight pos_weight reduction",
    "hinge_embedding_loss": "input target margin reduction",
    "poisson_nll_loss": "input target log_input full eps reduction",
    "margin_ranking_loss": "input1 input2 target margin reduction",
    "cosine_embedding_loss": "input1 input2 target margin reduction",
}
"""Functions of ``torch`` that encode the reduction as a number, with their arguments in order."""


def _call_with_numbered_reduction(
    loss: Callable[..., torch.Tensor], names: str, *args: Any, **named: Any
) -> torch.Tensor:
    """Call ``loss`` of ``torch.nn.functional`` with the arguments of the function of the same name in ``torch``.

    Its default reduction is 0 (none): Python's argument parser does not apply the default of the schema.
    """
    options = dict(zip(names.split(), args, strict=False)) | named
    return _reduce(loss(**options | {"reduction": "none"}), ("none", "mean", "sum")[options.get("reduction", 0)])


for _name, _names in _NUMBERED_REDUCTIONS.items():
    implements(getattr(torch, _name), tensors=None)(partial(_call_with_numbered_reduction, getattr(F, _name), _names))
