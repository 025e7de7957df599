"""The backward pass of one layer on one rank, in blocks of steps.

Blocks are processed from the last to the first; the gradient that leaves a block enters the block before it. They bound
the memory that is needed in addition to the layer's inputs and outputs: derivatives of ``SWEEP_BYTES``, or Jacobians
(T, B, H, H) of ``SCAN_BYTES`` if a scan needs them. :mod:`~distconv.layers.recurrent.recurrence` calls this module,
which does not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from distconv.kernels.recurrence import backpropagate_steps
from distconv.kernels.scan import backpropagate

from .cells import CellWeights, RecurrentCell, StepDerivatives
from .methods import Method

SWEEP_BYTES = 1 << 22
"""Bytes of derivatives of a block for the sequential method, which fit into a core's cache."""

SCAN_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes of Jacobians of a block for a scan. Larger, since a scan gains by length, most of all on a GPU."""


@dataclass(frozen=True)
class ForwardSteps:
    """The steps of a forward pass."""

    cell: RecurrentCell
    weights: CellWeights
    x: torch.Tensor
    """Inputs (T, B, I)."""
    entry_state: torch.Tensor
    """State before the first step (B, H)."""
    states: torch.Tensor
    """States after each step (T, B, H)."""

    def blocks(self, *, scans: bool) -> Iterator[slice]:
        """Yield blocks of steps, from the last to the first, whose derivatives fit into the memory limit.

        Parameters
        ----------
        scans : bool
            True if a scan needs the Jacobians of a block. Otherwise only the derivatives are stored.

        Yields
        ------
        slice
        """
        count, batch, width = self.states.shape
        values = width * (2 * width if scans else 3 * self.cell.gates + 4)
        most = SCAN_BYTES["cuda" if self.states.is_cuda else "cpu"] if scans else SWEEP_BYTES
        size = max(1, most // max(1, values * batch * self.states.element_size()))
        for stop in range(count, 0, -size):
            yield slice(max(0, stop - size), stop)

    def states_before(self, block: slice) -> torch.Tensor:
        """Return the states before each step of ``block``."""
        if block.start:
            return self.states[block.start - 1 : block.stop - 1]
        return torch.cat([self.entry_state[None], self.states[: block.stop - 1]])

    def factors(self, block: slice) -> StepDerivatives:
        """Return the derivatives of the steps of ``block``."""
        return self.cell.derivatives(self.x[block], self.states_before(block), self.states[block], self.weights)


@dataclass
class RecurrentGradients:
    """Gradients of inputs, parameters and the state before all steps, summed over the blocks processed so far."""

    steps: ForwardSteps
    carry: torch.Tensor
    """Gradient of the state before the processed blocks, (B, H)."""
    input_gradient: torch.Tensor | None
    """Gradient of the inputs, (T, B, I); None if it is not needed."""
    weight_gradients: list[torch.Tensor] = field(default_factory=list)
    """Gradients of the weights in torch's order: input, hidden, and their biases."""

    def __post_init__(self) -> None:
        weights = self.steps.weights
        parameters = (weights.input, weights.hidden, weights.input_bias, weights.hidden_bias)
        self.weight_gradients = [torch.zeros_like(weight) for weight in parameters if weight is not None]

    def add(self, block: slice, sources: torch.Tensor, method: Method) -> None:
        """Add the gradients of the next block of :meth:`ForwardSteps.blocks`, and set ``carry`` to that before it.

        Parameters
        ----------
        block : slice
            Steps that end where the blocks processed so far begin.
        sources : Tensor
            Gradients (T, B, H) of the block's states from outside of the recurrence.
        method : Method
        """
        # 1. The recurrence gives the gradients of the states. 2. Everything else is one product for all steps.
        factors = self.steps.factors(block)
        by_state, self.carry = _backpropagate_block(self.carry, sources, factors, self.steps.weights.hidden, method)
        hidden = (by_state[:, :, None] * factors.hidden).flatten(0, 1).flatten(1)
        # Without gates of their own, input and hidden part have the same derivative: compute it once.
        same = factors.input is factors.hidden
        input = hidden if same else (by_state[:, :, None] * factors.input).flatten(0, 1).flatten(1)
        self.weight_gradients[0].addmm_(input.T, self.steps.x[block].flatten(0, 1))
        self.weight_gradients[1].addmm_(hidden.T, self.steps.states_before(block).flatten(0, 1))
        for total, gates in zip(self.weight_gradients[2:], (input, hidden), strict=False):
            total.add_(gates.sum(0))
        if self.input_gradient is not None:
            # The gradient is contiguous, so flatten is a view, and `out` writes into the block of it.
            torch.mm(input, self.steps.weights.input, out=self.input_gradient[block].flatten(0, 1))


def compute_gradients(
    steps: ForwardSteps,
    sources: torch.Tensor,
    carry: torch.Tensor,
    method: Method,
    *,
    needs_input_gradient: bool = True,
) -> RecurrentGradients:
    """Return the gradients of a layer on this rank.

    Parameters
    ----------
    steps : ForwardSteps
    sources : Tensor
        Gradients of the states from outside of the recurrence (T, B, H).
    carry : Tensor
        Gradient of the last state from later steps (B, H).
    method : Method
    needs_input_gradient : bool
        True to compute the gradient of the inputs. Otherwise it is None.

    Returns
    -------
    RecurrentGradients
    """
    result = RecurrentGradients(steps, carry, torch.empty_like(steps.x).contiguous() if needs_input_gradient else None)
    for block in steps.blocks(scans=method.scans):
        result.add(block, sources[block], method)
    return result


def _backpropagate_block(
    carry: torch.Tensor, sources: torch.Tensor, factors: StepDerivatives, weight: torch.Tensor, method: Method
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the states (T, B, H), and of the state before them (B, H)."""
    if not (method.scans and carry.numel()):
        return backpropagate_steps(carry, sources, factors.hidden, factors.direct, weight)
    # The scan starts with the last step. Its sources enter before the product with the step's Jacobian, so it returns
    # the gradients before each step; each of them is the carry of the next one.
    jacobians, sources = factors.reversed().jacobians(weight), sources.flip(0)
    name: Literal["truncated", "blelloch"] = "truncated" if method is Method.TRUNCATED else "blelloch"
    reached = backpropagate(carry, jacobians, name, sources=apply_jacobians(jacobians, sources))
    by_state = sources + torch.cat([carry[None], reached[:-1]])
    return by_state.flip(0), reached[-1]


def apply_jacobians(jacobians: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return the product of each matrix with its vector.

    Parameters
    ----------
    jacobians : Tensor
        (T, B, H, H).
    vectors : Tensor
        (T, B, H).

    Returns
    -------
    Tensor
        (T, B, H).
    """
    return torch.matmul(jacobians, vectors[..., None])[..., 0]


def compose_steps(steps: ForwardSteps, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the map from the gradient v after the last step to the gradient J v + s before the first step.

    Neighbouring maps are multiplied, then their products, as in the up-sweep of Algorithm 1.

    Source: BPPSA, Algorithm 1.

    Parameters
    ----------
    steps : ForwardSteps
    sources : Tensor
        Gradients of the states from outside of the recurrence (T, B, H).

    Returns
    -------
    tuple of Tensor
        J (B, H, H) and s (B, H).
    """
    batch, width = steps.entry_state.shape
    matrix = torch.eye(width, dtype=sources.dtype, device=sources.device).repeat(batch, 1, 1)
    shift = sources.new_zeros(batch, width)
    for block in steps.blocks(scans=True):
        matrices = steps.factors(block).reversed().jacobians(steps.weights.hidden)
        shifts = apply_jacobians(matrices, sources[block].flip(0))
        # An odd map at the end waits for the next level.
        while len(matrices) > 1:
            paired = len(matrices) // 2 * 2
            later, rest = matrices[1:paired:2], matrices[paired:]
            shifts = torch.cat([shifts[1:paired:2] + apply_jacobians(later, shifts[:paired:2]), shifts[paired:]])
            matrices = torch.cat([later @ matrices[:paired:2], rest])
        # Blocks come from the last to the first, so the map of this block is applied after the previous ones.
        matrix, shift = matrices[0] @ matrix, shifts[0] + apply_jacobians(matrices[0], shift)
    return matrix, shift
