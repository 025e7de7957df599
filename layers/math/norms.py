"""Norms and similarities along dimensions, also split ones.

A norm over a split dimension is the norm of the norms of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import broadcast_shape, result_shape
from distconv.layers.math.matmul import batch_labels, contract
from distconv.layers.math.reductions import Dims, plan_fold, result_dtype, stack_over_ranks, sum_over_ranks
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


@implements(torch.linalg.vector_norm)
def vector_norm(
    x: DistTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: None = None,
) -> torch.Tensor:
    """Compute ``torch.linalg.vector_norm`` as the norm of the norms of the blocks.

    Parameters
    ----------
    x, ord, dim, keepdim, dtype, out
        As in ``torch.linalg.vector_norm``.

    Returns
    -------
    Tensor
    """
    _reject_out(out)
    result_shape(torch.linalg.vector_norm, x, ord, dim, keepdim, dtype=dtype)
    dtype = dtype or result_dtype(torch.linalg.vector_norm, x)
    if isinstance(dim, (list, tuple)) and not dim:
        dim = None
    fold = plan_fold(x, dim, keepdim)
    if not fold.axes:
        return fold.wrap(torch.linalg.vector_norm(x.local, ord, dim, keepdim, dtype=dtype))
    if math.isinf(ord):
        sizes = x.to(dtype).abs()
        return sizes.amax(fold.dims, keepdim) if ord > 0 else sizes.amin(fold.dims, keepdim)
    # For negative orders the neutral element is infinity, but torch rejects blocks without elements.
    local = _pad_empty_dims(x.local, fold.dims) if ord < 0 else x.local
    norms = torch.linalg.vector_norm(local, ord, fold.dims, keepdim, dtype=accumulation_dtype(dtype))
    # Order 0 counts elements that are not zero. Counts add up; their norm of order 0 would count ranks.
    if ord == 0:
        return fold.wrap(sum_over_ranks(norms, fold).to(norms.dtype if dtype.is_complex else dtype))
    # The norm of the norms of the blocks: (sum |x|^p)^(1/p) of each block is raised to p again. No power can overflow
    # that torch's own norm would not overflow.
    total = torch.linalg.vector_norm(stack_over_ranks(norms, fold), ord, 0)
    return fold.wrap(total.to(norms.dtype if dtype.is_complex else dtype))


def _pad_empty_dims(block: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return ``block`` with one element, infinity, in each of ``dims`` where it has none.

    Infinity adds nothing to a norm of negative order, and torch rejects an empty dimension.
    """
    around = [n for d in range(block.dim())[::-1] for n in (0, int(d in dims and not block.shape[d]))]
    return F.pad(block, around, value=math.inf) if any(around) else block


def _reject_out(out: Any) -> None:
    if out is not None:
        raise NoRule("a norm with out= has no distributed rule: assign the result instead")


@implements(torch.norm, torch.Tensor.norm)
def norm(
    input: DistTensor,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``torch.norm`` as a vector norm or as the nuclear norm.

    Parameters
    ----------
    input, p, dim, keepdim, out, dtype
        As in ``torch.norm``.

    Returns
    -------
    Tensor
    """
    _reject_out(out)
    result_shape(torch.norm, input, p, dim, keepdim, dtype=dtype)
    # By singular values, so rows and columns must be complete.
    if p == "nuc":
        dims = (0, 1) if dim is None else dim
        result: torch.Tensor = torch.linalg.matrix_norm(input, "nuc", dims, keepdim, dtype=dtype)
        return result
    order = 2.0 if p in ("fro", None) else float(p)
    return vector_norm(input, order, dim, keepdim, dtype=dtype)


@implements(torch.linalg.norm)
def linalg_norm(
    A: DistTensor,
    ord: float | str | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``torch.linalg.norm`` as a norm of vectors or of matrices.

    Parameters
    ----------
    A, ord, dim, keepdim, out, dtype
        As in ``torch.linalg.norm``.

    Returns
    -------
    Tensor
    """
    _reject_out(out)
    result_shape(torch.linalg.norm, A, ord, dim, keepdim, dtype=dtype)
    matrices = (A.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)) == 2
    if ord is not None and matrices and ord != "fro":
        dims = (0, 1) if dim is None else dim
        result: torch.Tensor = torch.linalg.matrix_norm(A, ord, dims, keepdim, dtype=dtype)
        return result
    return vector_norm(A, 2.0 if ord in (None, "fro") else float(ord), dim, keepdim, dtype=dtype)


@implements(F.normalize)
def normalize(input: DistTensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None) -> torch.Tensor:
    """Compute ``F.normalize`` without gathering a split ``dim``.

    torch's implementation expands the norms before it divides, and would gather ``dim``.

    Parameters
    ----------
    input, p, dim, eps, out
        As in ``F.normalize``.

    Returns
    -------
    Tensor
    """
    _reject_out(out)
    return input.div(norm(input, p, dim, keepdim=True).clamp_min(eps))


@implements(F.cosine_similarity, torch.cosine_similarity, tensors="x1 x2")
def cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """Compute ``F.cosine_similarity`` from vector norms and a sum.

    Parameters
    ----------
    x1, x2, dim, eps
        As in ``F.cosine_similarity``.

    Returns
    -------
    Tensor
    """
    result_shape(F.cosine_similarity, x1, x2, dim, eps)
    shape = broadcast_shape((x1.shape, x2.shape))
    units: list[torch.Tensor] = []
    for operand in (x1, x2):
        vectors = operand.expand(shape)
        length = torch.linalg.vector_norm(vectors, 2, dim, keepdim=True).clone()
        with torch.no_grad():  # As in torch, the gradient ignores eps.
            length.clamp_min_(eps)
        units.append(vectors / length)
    product: torch.Tensor = torch.mul(units[0], units[1])
    return product.sum(dim)


@implements(F.pairwise_distance, torch.pairwise_distance, tensors="x1 x2")
def pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    """Compute ``F.pairwise_distance`` as a vector norm.

    Parameters
    ----------
    x1, x2, p, eps, keepdim
        As in ``F.pairwise_distance``.

    Returns
    -------
    Tensor
    """
    result_shape(F.pairwise_distance, x1, x2, p, eps, keepdim)
    length: torch.Tensor = torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
    return length


@implements(torch.dist, torch.Tensor.dist, tensors="input other")
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Compute ``torch.dist`` as a vector norm.

    Parameters
    ----------
    input, other, p
        As in ``torch.dist``.

    Returns
    -------
    Tensor
    """
    length: torch.Tensor = torch.linalg.vector_norm(input - other, p)
    return length


_MM = "use_mm_for_euclid_dist"

_FEW_POINTS = 25
"""Number of points up to which torch does not compute distances from products by default."""


@implements(torch.cdist, tensors="x1 x2", passes=None)
def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = f"{_MM}_if_necessary") -> DistTensor:
    """Compute ``torch.cdist`` of (..., P, M) and (..., R, M); points of both stay split if their axes differ.

    Parameters
    ----------
    x1, x2, p, compute_mode
        As in ``torch.cdist``.

    Returns
    -------
    DistTensor
    """
    shape = result_shape(torch.cdist, x1, x2, p)
    if compute_mode == f"{_MM}_if_necessary":
        # Selected by the global numbers of points, as in a single process.
        compute_mode = _MM if max(shape[-2:]) > _FEW_POINTS else f"donot_{_MM}"
    function = partial(torch.cdist, p=p, compute_mode=compute_mode)
    # A distance is no sum of products over coordinates, so "m" must not be split.
    labels = [[*batch_labels(x1, 2), "p", "m"], [*batch_labels(x2, 2), "r", "m"]]
    batch = max(batch_labels(x1, 2), batch_labels(x2, 2), key=len)
    return contract(function, [x1, x2], labels, [*batch, "p", "r"], shape, ["m"])
