"""The backward pass of one layer in one direction on one rank: a block of steps at a time, from the last to the first.

Memory beside the layer's inputs and outputs is bounded: at a time there are derivatives of ``SWEEP_BYTES`` of steps, or
``SCAN_BYTES`` of their Jacobians (T, B, H, H) where a scan needs them. What leaves a block enters the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from distconv.kernels.recurrence import backpropagate_steps
from distconv.kernels.scan import backpropagate

from .cells import CellWeights, Factors, RecurrentCell
from .methods import Method

SWEEP_BYTES = 1 << 22
"""Step after step, what a core's cache holds."""

SCAN_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Of Jacobians more, since a scan gains by length: on a GPU, which a short one leaves empty, most of all."""


@dataclass(frozen=True)
class ForwardSteps:
    """Steps that were taken: inputs (T, B, I), the state before them (B, H), the states after each (T, B, H)."""

    cell: RecurrentCell
    weights: CellWeights
    x: torch.Tensor
    entry: torch.Tensor
    states: torch.Tensor

    def blocks(self, *, scans: bool) -> Iterator[slice]:
        """The steps in blocks of which derivatives, or Jacobians if it ``scans``, fit into memory; the last first."""
        count, batch, width = self.states.shape
        values = width * (2 * width if scans else 3 * self.cell.gates + 4)
        most = SCAN_BYTES["cuda" if self.states.is_cuda else "cpu"] if scans else SWEEP_BYTES
        size = max(1, most // max(1, values * batch * self.states.element_size()))
        for stop in range(count, 0, -size):
            yield slice(max(0, stop - size), stop)

    def before(self, block: slice) -> torch.Tensor:
        """The states before each step of ``block``."""
        if block.start:
            return self.states[block.start - 1 : block.stop - 1]
        return torch.cat([self.entry[None], self.states[: block.stop - 1]])

    def factors(self, block: slice) -> Factors:
        """Derivatives of the steps of ``block``."""
        return self.cell.derivatives(self.x[block], self.before(block), self.states[block], self.weights)


@dataclass
class RecurrentGradients:
    """Gradients of inputs, parameters and the state before all steps; sums, as far as the blocks are done."""

    steps: ForwardSteps
    carry: torch.Tensor
    """What reaches the state before the blocks that are done, (B, H)."""
    of_input: torch.Tensor | None
    """That of the inputs, (T, B, I), unless nobody needs it."""
    of_weights: list[torch.Tensor] = field(default_factory=list)
    """Those of the weights in torch's order: input, hidden, and their biases."""

    def __post_init__(self) -> None:
        weights = self.steps.weights
        given = (weights.input, weights.hidden, weights.input_bias, weights.hidden_bias)
        self.of_weights = [torch.zeros_like(weight) for weight in given if weight is not None]

    def add(self, block: slice, sources: torch.Tensor, method: Method) -> None:
        """Go back over ``block``, whose states have gradients ``sources`` (T, B, H) from outside."""
        factors = self.steps.factors(block)
        by_state, self.carry = _gone_back(self.carry, sources, factors, self.steps.weights.hidden, method)
        hidden = (by_state[:, :, None] * factors.hidden).flatten(0, 1).flatten(1)
        same = factors.input is factors.hidden
        input = hidden if same else (by_state[:, :, None] * factors.input).flatten(0, 1).flatten(1)
        self.of_weights[0].addmm_(input.T, self.steps.x[block].flatten(0, 1))
        self.of_weights[1].addmm_(hidden.T, self.steps.before(block).flatten(0, 1))
        for total, gates in zip(self.of_weights[2:], (input, hidden), strict=False):
            total.add_(gates.sum(0))
        if self.of_input is not None:
            torch.mm(input, self.steps.weights.input, out=self.of_input[block].flatten(0, 1))


def gradients(
    steps: ForwardSteps, sources: torch.Tensor, carry: torch.Tensor, method: Method, *, of_input: bool = True
) -> RecurrentGradients:
    """Gradients, given those of the states from outside (T, B, H) and from behind the last step (B, H)."""
    result = RecurrentGradients(steps, carry, torch.empty_like(steps.x).contiguous() if of_input else None)
    for block in steps.blocks(scans=method.scans):
        result.add(block, sources[block], method)
    return result


def _gone_back(
    carry: torch.Tensor, sources: torch.Tensor, factors: Factors, weight: torch.Tensor, method: Method
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the states (T, B, H), and what reaches the state before them, as ``sweep`` gives them."""
    if not (method.scans and carry.numel()):
        return backpropagate_steps(carry, sources, factors.hidden, factors.direct, weight)
    jacobians, sources = factors.reversed().jacobians(weight), sources.flip(0)
    name: Literal["truncated", "blelloch"] = "truncated" if method is Method.TRUNCATED else "blelloch"
    reached = backpropagate(carry, jacobians, name, sources=applied(jacobians, sources))
    by_state = sources + torch.cat([carry[None], reached[:-1]])
    return by_state.flip(0), reached[-1]


def applied(jacobians: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Each of the matrices (T, B, H, H) times its vector of (T, B, H)."""
    return torch.matmul(jacobians, vectors[..., None])[..., 0]


def product(steps: ForwardSteps, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of all steps together: from v behind the last to J v + s before the first, as J (B, H, H) and s (B, H).

    Products of neighbours, then of those, as in the up-sweep of Algorithm 1.
    """
    batch, width = steps.entry.shape
    matrix = torch.eye(width, dtype=sources.dtype, device=sources.device).repeat(batch, 1, 1)
    shift = sources.new_zeros(batch, width)
    for block in steps.blocks(scans=True):
        matrices = steps.factors(block).reversed().jacobians(steps.weights.hidden)
        shifts = applied(matrices, sources[block].flip(0))
        while len(matrices) > 1:
            whole = len(matrices) // 2 * 2
            later, rest = matrices[1:whole:2], matrices[whole:]
            shifts = torch.cat([shifts[1:whole:2] + applied(later, shifts[:whole:2]), shifts[whole:]])
            matrices = torch.cat([later @ matrices[:whole:2], rest])
        matrix, shift = matrices[0] @ matrix, shifts[0] + applied(matrices[0], shift)
    return matrix, shift
