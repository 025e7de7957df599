"""Where a stage's own graph begins: tensors that receive the gradient, and what the stage may work on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from distconv.tensor import DistTensor


class Minibatch(NamedTuple):
    """Which mini-batch ranks work on: its number, and its samples."""

    step: int
    samples: int


class StageInput:
    """A tensor that comes into a stage, cut off from the graph that made it.

    ``gradient``: what reached it in the last backward pass, None if nothing did. It is as it came: ``.grad`` would have
    a copy in the memory order of ``value``, and what follows would add up in another order than in one process.
    """

    def __init__(self, value: torch.Tensor, *, first: bool = False) -> None:
        self.value = separate(value) if first else value.detach()
        if not first:  # nobody asks for the gradient of the samples
            self.value.requires_grad_(value.is_floating_point() or value.is_complex())
        self._found: torch.Tensor | None = None

    def enter(self) -> torch.Tensor:
        """What the stage gets: the same memory, but no leaf nor a view, so that it may begin with work in place."""
        if not self.value.requires_grad:
            return self.value
        if isinstance(self.value, DistTensor):
            inside = _EnterStage.apply(self.value.local, self)  # type: ignore[no-untyped-call]
            return DistTensor(inside, self.value.dist, self.value.shape)
        return _EnterStage.apply(self.value, self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def gradient(self) -> torch.Tensor | None:
        """What has arrived of the gradient of ``value``, distributed as that is."""
        if self._found is None or not isinstance(self.value, DistTensor):
            return self._found
        return DistTensor(self._found, self.value.dist, self.value.shape)


def separate(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, outside of autograd, whose changes in place are counted separately.

    Micro-batches are views of one mini-batch, and views share one count of changes. A stage or loss that changes one of
    them in place would look to autograd as if it had changed all of them.
    """
    return value.detach() if isinstance(value, DistTensor) else value.data


class _EnterStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, entry: StageInput) -> torch.Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None]:
        ctx.entry._found = gradient
        return None, None


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """What a stage returns, as a list.

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
