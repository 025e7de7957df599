"""Gradients of leaves, and contributions to them that no_sync keeps, as a step finds them."""

from __future__ import annotations

from typing import Any

import torch

from distconv.communication import gradient_reduction

_GRAD: Any = torch.Tensor.grad
"""The attribute as autograd defines it; reading it does not finish reductions."""


def gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return ``leaf.grad``."""
    value: torch.Tensor | None = _GRAD.__get__(leaf)
    return value


def set_gradient(leaf: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set ``leaf.grad``."""
    _GRAD.__set__(leaf, value)


class Gradients:
    """Leaves with their gradients, and contributions kept by no_sync, as they were when they were added."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.kept = gradient_reduction.unsynced_grads()

    def add(self, leaf: torch.Tensor) -> None:
        """Note the gradient of ``leaf``, before it changes."""
        if id(leaf) not in self._before:
            self._before[id(leaf)] = leaf, gradient(leaf)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves, in the order in which they were added."""
        return [leaf for leaf, _ in self._before.values()]

    @property
    def values(self) -> list[torch.Tensor | None]:
        """Gradients of the leaves in their order, and then the kept contributions."""
        return [*(grad for _, grad in self._before.values()), *(share for _, share, _ in self.kept)]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is one of :attr:`values`."""
        return any(value is tensor for value in self.values)

    def put_back(self) -> None:
        """Restore which tensors the gradients and contributions are, not the values in their memory."""
        for leaf, grad in self._before.values():
            set_gradient(leaf, grad)
        gradient_reduction.set_unsynced_grads(self.kept)
