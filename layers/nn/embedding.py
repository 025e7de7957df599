"""Embeddings: indices stay split, and the table is replicated.

Each rank looks up its own indices, so forward sends no embeddings. In backward the gradient of the table is all-reduced
over the axes that split the indices, as for any parameter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.communication.transport import allreduce
from distconv.dispatch import OperatorKind, implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import (
    as_distributed,
    broadcast_block,
    first_grid,
    replicate_parameter,
    result_shape,
)
from distconv.layers.common.empty_blocks import run_like_other_ranks
from distconv.layers.common.value_check import check_indices
from distconv.tensor import DistTensor


@implements(torch.embedding, tensors="weight indices")
def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DistTensor:
    """Compute ``torch.embedding`` of indices (...): rows (..., features), whose features are not split.

    Parameters
    ----------
    weight, indices, padding_idx, scale_grad_by_freq, sparse
        As in ``torch.embedding``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``sparse=True``.
    """
    shape = result_shape(torch.embedding, weight, indices)
    table, index = _prepare_operands(weight, indices, sparse)
    # torch would count only the look-ups of this rank.
    if scale_grad_by_freq and index.dist.split_axes:
        table = _scale_grad_by_frequency(table, index)
        scale_grad_by_freq = False
    rows = torch.embedding(table, index.local, padding_idx, scale_grad_by_freq)
    return DistTensor(rows, index.dist.with_axes((*index.dist.axes, None)), shape)


@implements(F.embedding_bag, tensors="input weight offsets per_sample_weights")
def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> DistTensor:
    """Compute ``F.embedding_bag`` of bags of one length (N, L), split over bags.

    Parameters
    ----------
    input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
    include_last_offset, padding_idx
        As in ``F.embedding_bag``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        With ``offsets``, ``sparse=True``, or ``scale_grad_by_freq=True``.
    """
    if scale_grad_by_freq:  # torch divides by other numbers than the frequencies, which depend on the order of rows
        raise NoRule("F.embedding_bag with scale_grad_by_freq=True: leave it out, or sum the rows of F.embedding")
    if offsets is not None or input.dim() != 2:
        raise NoRule("F.embedding_bag with offsets: make all bags the same length, filled up with padding_idx")
    options = {"mode": mode, "padding_idx": padding_idx}
    shape = result_shape(F.embedding_bag, input, weight, per_sample_weights=per_sample_weights, **options)
    if isinstance(input, DistTensor):
        input = input.replicated([1])
    if max_norm is not None:
        # Before _prepare_operands, because the table must not be changed in place once it is part of the graph.
        embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    table, index = _prepare_operands(weight, input, sparse)
    factors = None if per_sample_weights is None else broadcast_block(per_sample_weights, index.dist, index.shape)

    def look_up(indices: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        return F.embedding_bag(indices, table, per_sample_weights=factors, **options)  # type: ignore[arg-type]

    dist = index.dist.with_axes((index.dist.axes[0], None))
    return DistTensor(run_like_other_ranks(look_up, dist.local_shape(shape), index.local, factors), dist, shape)


def _prepare_operands(weight: torch.Tensor, indices: torch.Tensor, sparse: bool) -> tuple[torch.Tensor, DistTensor]:
    """Return the full table, whose gradient is all-reduced, and the checked indices. Collective."""
    if sparse:
        raise NoRule("an embedding with sparse=True has no distributed rule: leave it out")
    index = as_distributed(indices, first_grid(indices, weight))
    check_indices(index.local, weight.shape[0], index.grid, lambda _: IndexError("index out of range in self"))
    return replicate_parameter(weight, index.dist), index


def _scale_grad_by_frequency(table: torch.Tensor, index: DistTensor) -> torch.Tensor:
    """Return ``table`` with its gradient divided by the number of look-ups of each row on all ranks. Collective."""
    if not table.requires_grad:
        return table
    looked_up = index.local.reshape(-1)
    counts = torch.zeros(table.shape[0], dtype=torch.int64, device=table.device)
    counts = counts.index_add_(0, looked_up, torch.ones_like(looked_up, dtype=torch.int64))
    counts = allreduce(index.grid.comm(index.dist.split_axes), counts, "counts of looked up rows")
    # The table is the result of replicate_parameter, not a leaf: a hook on a leaf would stay after this step.
    table.register_hook(lambda grad: grad / counts.clamp(min=1).to(grad.dtype)[:, None])
    return table


@implements(torch.embedding_renorm_, kind=OperatorKind.EFFECT, tensors="weight indices")
def embedding_renorm_(
    weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Compute ``torch.embedding_renorm_`` with gathered indices, so that the same rows change on every rank.

    Parameters
    ----------
    weight, indices, max_norm, norm_type
        As in ``torch.embedding_renorm_``.

    Returns
    -------
    Tensor

    Raises
    ------
    NoRule
        If the table is a DistTensor.
    """
    if isinstance(weight, DistTensor):
        raise NoRule("an embedding with max_norm and a distributed table: leave max_norm out, or use a plain parameter")
    # All ranks have the same gathered indices, and change the same rows of their replicas of the table.
    gathered = indices.gather() if isinstance(indices, DistTensor) else indices
    if gathered.numel():
        torch.embedding_renorm_(weight, gathered, max_norm, norm_type)
    return weight
