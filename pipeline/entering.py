"""Where a stage's own graph begins: leaves that receive the gradient, and what the stage may work on."""

from __future__ import annotations

from typing import Any

import torch

from distconv.tensor import DistTensor


class _Enter(torch.autograd.Function):
    """The same memory, but no leaf, nor a view of one: a stage may begin with an operation in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def leaf(value: torch.Tensor) -> torch.Tensor:
    """``value`` cut off from the graph that made it; has a ``.grad`` after backward if its dtype can have one."""
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def entering(value: torch.Tensor) -> torch.Tensor:
    """What the stage gets in place of the leaf ``value``."""
    if not value.requires_grad:
        return value
    if isinstance(value, DistTensor):
        return DistTensor(_Enter.apply(value.local), value.dist, value.shape)  # type: ignore[no-untyped-call]
    return _Enter.apply(value)  # type: ignore[no-any-return, no-untyped-call]
