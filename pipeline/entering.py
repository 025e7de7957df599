"""Where a stage's own graph begins: leaves that receive the gradient, and what the stage may work on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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


@contextmanager
def gradients_of(leaves: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """The gradients that reach ``leaves`` in a backward pass inside; None for those that none reaches.

    As they come: ``.grad`` would have the leaf's memory order, and what follows would add up in another order than in
    one process.
    """
    found: list[torch.Tensor | None] = [None] * len(leaves)
    kept = ((i, value) for i, value in enumerate(leaves) if value.requires_grad)
    hooks = [value.register_hook(partial(found.__setitem__, i)) for i, value in kept]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
