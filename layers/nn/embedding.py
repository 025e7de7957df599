"""Embeddings: indices keep their splits, each rank looks its own up in the full table.

The forward pass sends no embeddings. In the backward pass the table's gradient is summed over the axes that split the
indices, as that of any parameter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from distconv.communication.transport import allreduce
from distconv.dispatch import OperatorKind, implements
from distconv.errors import NoRule
from distconv.layers.plumbing.alignment import aligned, as_distributed, result_shape, whole_over
from distconv.layers.plumbing.empty_blocks import run_like_other_ranks
from distconv.layers.plumbing.value_check import check_within
from distconv.tensor import DistTensor


@implements(torch.embedding, tensors="weight indices")
def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DistTensor:
    """``torch.embedding`` of indices (...): rows (..., features), of which the features are not split.

    Raises
    ------
    NoRule
        With ``sparse=True``.
    """
    shape = result_shape(torch.embedding, weight, indices)
    table, index = _operands(weight, indices, sparse)
    if scale_grad_by_freq and index.dist.split_axes:
        table = _scaled_by_frequency(table, index)
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
    """``F.embedding_bag`` of bags of one length (N, L): each rank has some of the bags.

    Raises
    ------
    NoRule
        With ``offsets``, ``sparse=True``, or ``scale_grad_by_freq=True``.
    """
    if scale_grad_by_freq:  # torch divides by other numbers than the frequencies, which depend on the order of rows
        raise NoRule("F.embedding_bag with scale_grad_by_freq=True: leave it out, or sum the rows of F.embedding")
    if offsets is not None or input.dim() != 2:
        raise NoRule("F.embedding_bag with offsets: make the bags of one length, with padding_idx= behind their ends")
    options = {"mode": mode, "padding_idx": padding_idx}
    shape = result_shape(F.embedding_bag, input, weight, per_sample_weights=per_sample_weights, **options)
    if isinstance(input, DistTensor):
        input = input.replicated([1])
    if max_norm is not None:
        # Before the table enters the work as a view, which must not change any more.
        embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    table, index = _operands(weight, input, sparse)
    factors = None if per_sample_weights is None else aligned(per_sample_weights, index.dist, index.shape)

    def look_up(own: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        return F.embedding_bag(own, table, per_sample_weights=factors, **options)  # type: ignore[arg-type]

    dist = index.dist.with_axes((index.dist.axes[0], None))
    return DistTensor(run_like_other_ranks(look_up, dist.local_shape(shape), index.local, factors), dist, shape)


def _operands(weight: torch.Tensor, indices: torch.Tensor, sparse: bool) -> tuple[torch.Tensor, DistTensor]:
    """Return the full table as it enters work that is split as the indices are, and the indices, checked."""
    if sparse:
        raise NoRule("an embedding with sparse=True: leave it out, or its gradients are computed on every rank")
    index = as_distributed(indices, next(t.grid for t in (indices, weight) if isinstance(t, DistTensor)))
    check_within(index.local, weight.shape[0], index.grid, lambda _: IndexError("index out of range in self"))
    return whole_over(weight, index.dist), index


def _scaled_by_frequency(table: torch.Tensor, index: DistTensor) -> torch.Tensor:
    """Return ``table``, whose gradient is divided by how often each row is looked up on all ranks together."""
    if not table.requires_grad:
        return table
    looked_up = index.local.reshape(-1)
    counts = torch.zeros(table.shape[0], dtype=torch.int64, device=table.device)
    counts = counts.index_add_(0, looked_up, torch.ones_like(looked_up, dtype=torch.int64))
    counts = allreduce(index.grid.comm(index.dist.split_axes), counts, "counts of looked up rows")
    # Not a leaf, whose hook would stay: it has entered split work.
    table.register_hook(lambda grad: grad / counts.clamp(min=1).to(grad.dtype)[:, None])
    return table


@implements(torch.embedding_renorm_, kind=OperatorKind.EFFECT, tensors="weight indices")
def embedding_renorm_(
    weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.embedding_renorm_``: the same rows of the full table change on every rank.

    Raises
    ------
    NoRule
        If the table is split.
    """
    if isinstance(weight, DistTensor):
        raise NoRule("an embedding with max_norm and a distributed table: leave max_norm out, or use a plain parameter")
    given = indices.gather() if isinstance(indices, DistTensor) else indices
    if given.numel():
        torch.embedding_renorm_(weight, given, max_norm, norm_type)
    return weight
