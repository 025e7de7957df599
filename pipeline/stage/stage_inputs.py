"""Inputs of a stage, where its own graph begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from distconv.tensor import DistTensor


class Minibatch(NamedTuple):
    """Number of a mini-batch, and the number of its samples.

    Messages carry both. Ranks that run different steps, or have other numbers of samples, therefore raise an error.
    """

    step: int
    samples: int


class StageInput:
    """Input tensor of a stage, detached from the graph that made it.

    Parameters
    ----------
    value : Tensor
    first : bool
        True for samples, which need no gradient. Otherwise the input receives one.
    """

    def __init__(self, value: torch.Tensor, *, first: bool = False) -> None:
        # A version counter of its own, since micro-batches are views of one mini-batch.
        self.value = detach_version(value) if first else value.detach()
        if not first:  # samples need no gradient
            self.value.requires_grad_(value.is_floating_point() or value.is_complex())
        self._found: torch.Tensor | None = None

    def enter(self) -> torch.Tensor:
        """Return the tensor for the stage, on the same memory.

        It is neither a leaf nor a view, so a stage may begin with an in-place operation.
        """
        if not self.value.requires_grad:
            return self.value
        if isinstance(self.value, DistTensor):
            inside = _EnterStage.apply(self.value.local, self)  # type: ignore[no-untyped-call]
            return DistTensor(inside, self.value.dist, self.value.shape)
        return _EnterStage.apply(self.value, self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def gradient(self) -> torch.Tensor | None:
        """Gradient that the last backward pass computed; None if there is none.

        It is not copied. ``.grad`` would hold a copy in the memory order of ``value``, and later sums would have
        another order than in one process.
        """
        if self._found is None or not isinstance(self.value, DistTensor):
            return self._found
        return DistTensor(self._found, self.value.dist, self.value.shape)


def detach_version(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, outside of autograd, with its own version counter.

    Micro-batches are views of one mini-batch, and views share a version counter. A stage or loss that changes one of
    them in place would otherwise invalidate all of them for autograd.
    """
    return value.detach() if isinstance(value, DistTensor) else value.data


class _EnterStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, entry: StageInput) -> torch.Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)  # without a gradient, None is sent to the stage before, not zeros
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        ctx.entry._found = gradient
        return None, None


def as_list(outputs: Any) -> list[torch.Tensor]:
    """Return the result of a stage as a list.

    Raises
    ------
    TypeError
        If it is neither a tensor nor several.
    """
    values = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a stage must return tensors, not {type(value).__name__}")
    return values
