"""One layer in one direction: torch's forward pass, and a backward pass through time by a selectable method.

If the steps are split over ranks, the state is sent from rank to rank. In backward dl/dh is sent in the opposite
direction, or a scan over the ranks computes it. Large batches are divided into parts, so that a rank works on one part
while other ranks work on other parts. :mod:`~distconv.layers.recurrent.stack` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from distconv.communication.collectives import apply
from distconv.errors import UnsupportedOperation

from .backward import ForwardSteps, RecurrentGradients, gradients, product
from .cells import CellWeights, RecurrentCell
from .methods import BackwardProblem, Method, fastest
from .time_ranks import TimeRanks

PART_VALUES = 4096
"""Minimum number of values of a state, over the samples of a part. A step of fewer values is not faster."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A layer in one direction, with the method of its backward pass."""

    cell: RecurrentCell
    method: Method
    ranks: TimeRanks | None = None
    """The ranks among which the steps are split; None if this rank has all steps."""

    def __call__(self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the states of this rank's steps. Collective if steps are split.

        Parameters
        ----------
        x : Tensor
            This rank's inputs (T, B, I).
        start : Tensor
            State before the first step of all ranks (B, H); only the first rank uses its values.
        weights : sequence of Tensor
            In torch's order.

        Returns
        -------
        Tensor
            (T, B, H).

        Raises
        ------
        UnsupportedOperation
            For torch's backward if the steps are split over ranks.
        """
        if self.method is Method.AUTO:
            return replace(self, method=fastest(self._problem(x, weights[1], self.ranks)))(x, start, weights)
        if self.method is Method.AUTOGRAD:
            if self.ranks is not None:
                raise UnsupportedOperation(
                    "method='autograd': torch cannot go back over ranks that share the steps of a sequence; use 'auto'"
                )
            return self.cell.states(x, start, weights) if x.shape[1] else _no_samples(x, start, weights)
        if torch.is_autocast_enabled(x.device.type):
            x, start = x.to(weights[0].dtype), start.to(weights[0].dtype)
        return apply(_Recurrence, self, x, start, *weights)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of this rank's steps (T, B, H), and the state before them (B, H). Collective."""
        if self.ranks is None:
            return self._states(x, start, weights), start
        entries, outputs, sent = [], [], []
        for part in self._parts(start):
            entries.append(self.ranks.receive(self.ranks.earlier, start[part]))
            outputs.append(self._states(x[:, part], entries[-1], weights))
            sent.append(self.ranks.send(self.ranks.later, torch.cat([entries[-1][None], outputs[-1]])[-1]))
        for exchange in sent:
            exchange.wait()
        return _joined(outputs, 1), _joined(entries, 0)

    def _states(self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        if not (x.shape[0] and x.shape[1]):
            return start.new_zeros(*x.shape[:2], start.shape[1])
        return self.cell.states(x, start, weights)

    def _parts(self, start: torch.Tensor) -> list[slice]:
        """Return slices of the samples, as many as there are ranks unless they would be too small."""
        assert self.ranks is not None
        samples = len(start)
        count = max(1, min(self.ranks.comm.size, samples, start.numel() // PART_VALUES))
        edges = [samples * index // count for index in range(count + 1)]
        return [slice(low, high) for low, high in pairwise(edges)]

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, steps: ForwardSteps, sources: torch.Tensor, *, of_input: bool) -> list[RecurrentGradients]:
        """Return the gradients of each part of the samples. Collective if steps are split.

        Parameters
        ----------
        steps : ForwardSteps
        sources : Tensor
            Gradients of the states from outside of the recurrence (T, B, H).
        of_input : bool
            True to compute the gradient of the inputs.

        Returns
        -------
        list of RecurrentGradients
        """
        nothing = torch.zeros_like(steps.entry)
        if self.ranks is None:
            return [gradients(steps, sources, nothing, self.method, of_input=of_input)]
        if self.method.scans:
            carry = self.ranks.scanned(*product(steps, sources)) if len(nothing) else nothing
            here = fastest(self._problem(steps.x, steps.weights.hidden, None))
            # torch's backward cannot start from the gradient that the later rank sends.
            here = self.method if here is Method.AUTOGRAD else here
            return [gradients(steps, sources, carry, here, of_input=of_input)]
        shares, sent = [], []
        for part in self._parts(nothing):
            own = ForwardSteps(steps.cell, steps.weights, steps.x[:, part], steps.entry[part], steps.states[:, part])
            carry = self.ranks.receive(self.ranks.later, nothing[part])
            shares.append(gradients(own, sources[:, part], carry, self.method, of_input=of_input))
            sent.append(self.ranks.send(self.ranks.earlier, shares[-1].carry))
        for exchange in sent:
            exchange.wait()
        return shares

    def _problem(self, x: torch.Tensor, weight: torch.Tensor, ranks: TimeRanks | None) -> BackwardProblem:
        """Return the sizes of the backward pass.

        Blocks of ranks differ by at most one step. The longest one is used, so that all ranks choose the same method.
        """
        steps, count = (len(x), 1) if ranks is None else (ranks.longest, ranks.comm.size)
        return BackwardProblem(steps, x.shape[1], weight.shape[1], self.cell.gates, count, x.device, weight.dtype)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Recurrence, x: torch.Tensor, start: torch.Tensor, *weights: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            y, entry = way.forward(x, start, weights)
        ctx.way = way
        ctx.save_for_backward(x, entry, y, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                "a second derivative (create_graph=True) of a recurrent layer that goes back by a method of its own; "
                "use method='autograd'"
            )
        x, entry, y, *weights = ctx.saved_tensors
        steps = ForwardSteps(ctx.way.cell, CellWeights(*weights), x, entry, y)
        parts = ctx.way.backward(steps, grad, of_input=ctx.needs_input_grad[1])
        of_weights = [sum(each[1:], each[0]) for each in zip(*(part.of_weights for part in parts), strict=True)]
        of_input = _joined([part.of_input for part in parts if part.of_input is not None], 1)
        first = ctx.way.ranks is None or ctx.way.ranks.earlier is None
        of_start = _joined([part.carry for part in parts], 0)
        # The gradient of the state before this rank's first step has been sent to the earlier rank.
        return None, of_input, of_start if first else torch.zeros_like(of_start), *of_weights


def _joined(parts: Sequence[torch.Tensor], dim: int) -> Any:
    """Return the parts of the samples concatenated; None if there are none."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _no_samples(x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the states of a block without samples, which torch's backward rejects, connected to the graph."""
    ends = sum((tensor.reshape(-1)[:0].sum() for tensor in (x, start, *weights)), start.new_zeros(()))
    return start.new_zeros(*x.shape[:2], start.shape[1]) + ends
