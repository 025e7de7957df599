"""Whether a gradient that comes to a backward pass is nobody else's, so that a sum may be made in its memory.

Autograd hands one tensor to several, keeps some for later, and lets hooks keep them; none of that shows in the tensor.
It shows in how often the tensor, its memory and what it is a view of are held: as often as a gradient that is known to
be fresh, or more often.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

Holders = tuple[int, ...]
"""How often a gradient is held, by :func:`holders`."""


def holders(gradient: torch.Tensor) -> Holders:
    """How often ``gradient``, its memory and its base are held; to be called by a Function's ``backward`` itself."""
    if gradient.layout is not torch.strided:
        return ()
    storage, base = gradient.untyped_storage(), gradient._base
    return (
        sys.getrefcount(gradient),
        gradient._use_count(),  # type: ignore[attr-defined]
        # A view's base holds the memory once more.
        torch._C._storage_Use_Count(storage._cdata) - (base is not None),
        0 if base is None else sys.getrefcount(base),
        # Who else holds memory that torch has been lent, an array's, is not known.
        not storage.resizable(),
    )


def is_exclusive(gradient: torch.Tensor, held: Holders) -> bool:
    """Whether sums may be made in the memory of ``gradient``, which is ``held`` so often."""
    return held in fresh_holders() and gradient.is_contiguous()


class _Fresh(torch.autograd.Function):
    """Hands back two gradients that it has just made: a whole tensor, and a view."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad.clone(), grad.clone().t()


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[Holders]) -> torch.Tensor:
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.found.append(holders(grad))
        return grad, None


@cache
def fresh_holders() -> frozenset[Holders]:
    """Return the holders of gradients that only autograd holds; the first call runs a small backward pass.

    The first grid makes that call, since a backward pass within another one would be recorded with it.
    """
    found: list[Holders] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 1, device="cpu", requires_grad=True)
        _Fresh.apply(_Counted.apply(x, found), _Counted.apply(x, found)).backward()  # type: ignore[no-untyped-call]
    return frozenset(found)
