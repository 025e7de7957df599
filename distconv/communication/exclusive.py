"""Check whether only the running backward pass uses a gradient, so that it may be summed in place.

Autograd passes one tensor to several functions, keeps some for later, and lets hooks keep them. A tensor does not show
any of this, but the reference counts of the tensor, its storage and its base do: they are those of a gradient that was
just computed, or larger. :mod:`.collectives` counts before each deferred reduction.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

ReferenceCounts = tuple[int, ...]
"""Reference counts of a gradient, by :func:`count_references`."""


def count_references(gradient: torch.Tensor) -> ReferenceCounts:
    """Count the references to a gradient, its storage and its base.

    Call it directly in a Function's ``backward``: each Python frame between holds one more reference.

    Parameters
    ----------
    gradient : Tensor
        The gradient as autograd passed it.

    Returns
    -------
    tuple of int
        To be compared with :func:`fresh_reference_counts`. Empty for a sparse tensor.
    """
    if gradient.layout is not torch.strided:
        return ()
    storage, base = gradient.untyped_storage(), gradient._base
    return (
        sys.getrefcount(gradient),
        gradient._use_count(),  # type: ignore[attr-defined]
        # The base of a view holds one more reference to the storage.
        torch._C._storage_Use_Count(storage._cdata) - (base is not None),
        0 if base is None else sys.getrefcount(base),
        # Memory that torch has borrowed, such as a NumPy array's, may have owners that no count shows.
        not storage.resizable(),
    )


def is_uniquely_owned(gradient: torch.Tensor, counts: ReferenceCounts) -> bool:
    """Return True if nothing else uses the memory of a gradient, so that it may hold the sum.

    Parameters
    ----------
    gradient : Tensor
        The gradient.
    counts : tuple of int
        Its reference counts, taken in the Function's ``backward``.
    """
    return counts in fresh_reference_counts() and gradient.is_contiguous()


class _MakeFreshGradients(torch.autograd.Function):
    """Function whose backward pass returns two new gradients: a full tensor, and a view."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad.clone(), grad.clone().t()


class _RecordReferences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[ReferenceCounts]) -> torch.Tensor:
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.found.append(count_references(grad))
        return grad, None


@cache
def fresh_reference_counts() -> frozenset[ReferenceCounts]:
    """Return the reference counts of gradients that only autograd holds.

    The first call runs a small backward pass. The first process grid makes that call, since a backward pass within
    another one would be recorded with it.

    Returns
    -------
    frozenset of tuple of int
        The counts of a full tensor and of a view.
    """
    found: list[ReferenceCounts] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 1, device="cpu", requires_grad=True)
        one, other = (_RecordReferences.apply(x, found) for _ in range(2))  # type: ignore[no-untyped-call]
        _MakeFreshGradients.apply(one, other).backward()  # type: ignore[no-untyped-call]
    return frozenset(found)
