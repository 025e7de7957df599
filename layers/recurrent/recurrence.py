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

from .backward import ForwardSteps, RecurrentGradients, compose_steps, compute_gradients
from .cells import CellWeights, RecurrentCell
from .methods import BackwardProblem, Method, fastest_method
from .time_ranks import TimeRanks

MIN_PART_VALUES = 4096
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
            return replace(self, method=fastest_method(self._problem(x, weights[1], self.ranks)))(x, start, weights)
        if self.method is Method.AUTOGRAD:
            if self.ranks is not None:
                raise UnsupportedOperation(
                    "method='autograd': torch's backward pass cannot cross ranks among which the steps are split. "
                    "Use 'auto'."
                )
            return self.cell.states(x, start, weights) if x.shape[1] else _states_without_samples(x, start, weights)
        if torch.is_autocast_enabled(x.device.type):
            x, start = x.to(weights[0].dtype), start.to(weights[0].dtype)
        return apply(_RecurrenceFunction, self, x, start, *weights)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of this rank's steps, and the state before them. Collective.

        Parameters
        ----------
        x, start, weights
            As in :meth:`__call__`.

        Returns
        -------
        tuple of Tensor
            (T, B, H) and (B, H).
        """
        if self.ranks is None:
            return self._states(x, start, weights), start
        entries, outputs, sent = [], [], []
        # Part by part: receive from the earlier rank, compute, send to the later one. The send is not waited for, so
        # that this rank computes its next part while the later rank computes this one.
        for part in self._parts(start):
            entries.append(self.ranks.receive(self.ranks.earlier, start[part]))
            outputs.append(self._states(x[:, part], entries[-1], weights))
            # A rank without steps passes on the state that it has received.
            sent.append(self.ranks.send(self.ranks.later, torch.cat([entries[-1][None], outputs[-1]])[-1]))
        # The sent tensors must exist until here.
        for exchange in sent:
            exchange.wait()
        return _concatenate(outputs, 1), _concatenate(entries, 0)

    def _states(self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        # torch's functions reject sequences without steps or samples.
        if not (x.shape[0] and x.shape[1]):
            return start.new_zeros(*x.shape[:2], start.shape[1])
        return self.cell.states(x, start, weights)

    def _parts(self, start: torch.Tensor) -> list[slice]:
        """Return slices of the samples, as many as there are ranks unless they would be too small."""
        assert self.ranks is not None
        # From values that are the same on all ranks along the axis, since these exchange one message for each part.
        samples = len(start)
        count = max(1, min(self.ranks.comm.size, samples, start.numel() // MIN_PART_VALUES))
        edges = [samples * index // count for index in range(count + 1)]
        return [slice(low, high) for low, high in pairwise(edges)]

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(
        self, steps: ForwardSteps, sources: torch.Tensor, *, needs_input_gradient: bool
    ) -> list[RecurrentGradients]:
        """Return the gradients of each part of the samples. Collective if steps are split.

        Parameters
        ----------
        steps : ForwardSteps
        sources : Tensor
            Gradients of the states from outside of the recurrence (T, B, H).
        needs_input_gradient : bool
            True to compute the gradient of the inputs.

        Returns
        -------
        list of RecurrentGradients
        """
        zeros = torch.zeros_like(steps.entry_state)
        if self.ranks is None:
            return [compute_gradients(steps, sources, zeros, self.method, needs_input_gradient=needs_input_gradient)]
        # By a scan: 1. all steps of this rank become one map; 2. a scan over the ranks gives each rank its carry;
        # 3. all ranks process their steps at the same time, by the method that is fastest on one rank.
        if self.method.scans:
            carry = self.ranks.scan_gradient(*compose_steps(steps, sources)) if len(zeros) else zeros
            local_method = fastest_method(self._problem(steps.x, steps.weights.hidden, None))
            # torch's backward cannot start from the gradient that the later rank sends.
            local_method = self.method if local_method is Method.AUTOGRAD else local_method
            return [compute_gradients(steps, sources, carry, local_method, needs_input_gradient=needs_input_gradient)]
        # Sequentially: the parts of the forward pass, with messages in the opposite direction.
        gradients, sent = [], []
        for part in self._parts(zeros):
            part_steps = ForwardSteps(
                steps.cell, steps.weights, steps.x[:, part], steps.entry_state[part], steps.states[:, part]
            )
            carry = self.ranks.receive(self.ranks.later, zeros[part])
            gradients.append(
                compute_gradients(
                    part_steps, sources[:, part], carry, self.method, needs_input_gradient=needs_input_gradient
                )
            )
            sent.append(self.ranks.send(self.ranks.earlier, gradients[-1].carry))
        for exchange in sent:
            exchange.wait()
        return gradients

    def _problem(self, x: torch.Tensor, weight: torch.Tensor, ranks: TimeRanks | None) -> BackwardProblem:
        """Return the sizes of the backward pass.

        Blocks of ranks differ by at most one step. The longest one is used, so that all ranks choose the same method.
        """
        steps, count = (len(x), 1) if ranks is None else (ranks.max_steps, ranks.comm.size)
        return BackwardProblem(steps, x.shape[1], weight.shape[1], self.cell.gates, count, x.device, weight.dtype)


class _RecurrenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, x: torch.Tensor, start: torch.Tensor, *weights: torch.Tensor) -> Any:
        # The inputs have the dtype of the weights already. Otherwise torch would compute in half precision, while
        # backward recomputes the gates in the dtype of the states.
        with torch.autocast(x.device.type, enabled=False):
            y, entry = recurrence.forward(x, start, weights)
        ctx.recurrence = recurrence
        ctx.save_for_backward(x, entry, y, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                "a recurrent layer has no second derivative (create_graph=True) unless torch computes its backward "
                "pass. Use method='autograd'."
            )
        x, entry, y, *weights = ctx.saved_tensors
        steps = ForwardSteps(ctx.recurrence.cell, CellWeights(*weights), x, entry, y)
        parts = ctx.recurrence.backward(steps, grad, needs_input_gradient=ctx.needs_input_grad[1])
        weight_gradients = [
            sum(each[1:], each[0]) for each in zip(*(part.weight_gradients for part in parts), strict=True)
        ]
        input_gradient = _concatenate([part.input_gradient for part in parts if part.input_gradient is not None], 1)
        is_first = ctx.recurrence.ranks is None or ctx.recurrence.ranks.earlier is None
        start_gradient = _concatenate([part.carry for part in parts], 0)
        # The gradient of the state before this rank's first step has been sent to the earlier rank.
        return None, input_gradient, start_gradient if is_first else torch.zeros_like(start_gradient), *weight_gradients


def _concatenate(parts: Sequence[torch.Tensor], dim: int) -> Any:
    """Return the parts of the samples concatenated; None if there are none."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _states_without_samples(x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the states of a block without samples, which torch's backward rejects, connected to the graph."""
    # A sum of nothing, so that the weights get a gradient of zeros: their all-reduce has a node on every rank.
    ends = sum((tensor.reshape(-1)[:0].sum() for tensor in (x, start, *weights)), start.new_zeros(()))
    return start.new_zeros(*x.shape[:2], start.shape[1]) + ends
