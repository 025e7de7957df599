"""Gradients of leaves before a step, and the contributions to them that ``no_sync`` keeps.

A read of ``grad`` as distconv defines it would finish pending gradient reductions. So this package reads and sets the
attribute as autograd defines it.
"""

from __future__ import annotations

from typing import Any

import torch

from distconv.communication import gradient_reduction

_GRAD: Any = torch.Tensor.grad
"""The attribute as autograd defines it. Reading it does not finish pending reductions."""


def get_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return ``leaf.grad`` without finishing pending reductions."""
    value: torch.Tensor | None = _GRAD.__get__(leaf)
    return value


def set_gradient(leaf: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set ``leaf.grad`` without finishing pending reductions.

    Parameters
    ----------
    leaf : Tensor
        A leaf of autograd.
    value : Tensor or None
        The gradient.
    """
    _GRAD.__set__(leaf, value)


class SavedGradients:
    """Gradients of leaves at the time when each leaf was added, and contributions kept by ``no_sync`` at the start."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.unsynced = gradient_reduction.unsynced_grads()

    def add(self, leaf: torch.Tensor) -> None:
        """Save the gradient of ``leaf``. Call it before the gradient changes; later calls have no effect."""
        # The leaf is kept alive with its gradient, so its id is not given to another tensor.
        if id(leaf) not in self._before:
            self._before[id(leaf)] = leaf, get_gradient(leaf)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves, in the order in which they were added."""
        return [leaf for leaf, _ in self._before.values()]

    @property
    def values(self) -> list[torch.Tensor | None]:
        """The gradients of :attr:`leaves`, followed by the kept contributions."""
        return [*(grad for _, grad in self._before.values()), *(grad for _, grad, _ in self.unsynced)]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is one of :attr:`values`."""
        return any(value is tensor for value in self.values)

    def restore(self) -> None:
        """Restore the gradient and contribution tensors themselves, but not the values in their memory."""
        for leaf, grad in self._before.values():
            set_gradient(leaf, grad)
        gradient_reduction.set_unsynced_grads(self.unsynced)
