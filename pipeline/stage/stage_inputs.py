"""Inputs of a stage, where its own graph begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from distconv.tensor import DistTensor


class Minibatch(NamedTuple):
    """Properties of a mini-batch that all ranks must agree on.

    Messages carry them. Ranks that run different steps, or pass other mini-batches, therefore raise an error.

    Attributes
    ----------
    step : int
        Number of the mini-batch.
    samples : int
        Number of its samples.
    needs_gradient : bool
        True if its input requires a gradient. Otherwise False.
    """

    step: int
    samples: int
    needs_gradient: bool = False

    def describe(self) -> str:
        """Return the properties other than the step, for messages."""
        return f"{self.samples} samples{' that require a gradient' if self.needs_gradient else ''}"


class StageInput:
    """Input tensor of a stage, detached from the graph that made it.

    Parameters
    ----------
    value : Tensor
    first : bool
        True for the input of the model, which is copied, because a stage may change it in place; it receives a gradient
        if it requires one. Otherwise the tensor is the result of another stage, and receives one if its dtype can.
    """

    def __init__(self, value: torch.Tensor, *, first: bool = False) -> None:
        wanted = value.requires_grad if first else value.is_floating_point() or value.is_complex()
        self.value = value.detach().clone() if first else value.detach()
        self.value.requires_grad_(wanted)
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
