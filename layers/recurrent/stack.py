"""Stacked layers in one or two directions, for tensors, packed sequences and DistTensors.

Computes what torch's recurrent functions compute, with a :class:`~.recurrence.Recurrence` for each layer and direction.
The kinds of input differ in the function that runs a layer in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from distconv.errors import ShapeError
from distconv.layers.common.alignment import as_distributed, broadcast_block, redistribute_balanced, replicate_parameter
from distconv.tensor import DistTensor

from .cells import RecurrentCell
from .methods import Method
from .recurrence import Recurrence
from .time_ranks import TimeRanks

Direction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Takes inputs, the state at the start (B, H), weights and ``reverse``; returns all states and the last one (B, H)."""


@dataclass(frozen=True)
class RecurrentStack:
    """The options of torch's recurrent functions, and the method of the backward pass."""

    cell: RecurrentCell
    method: Method
    bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool

    def __call__(
        self, input: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor], batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the last layer and the last states of all layers. Collective for DistTensors.

        Parameters
        ----------
        input : Tensor or DistTensor
            (T, B, I), or (B, T, I) with ``batch_first``.
        start : Tensor
            (layers * directions, B, H).
        weights : sequence of Tensor
            In torch's order.
        batch_first : bool

        Returns
        -------
        tuple of Tensor
            (T, B, directions * H), or batch first, and (layers * directions, B, H).

        Raises
        ------
        ShapeError
            If there are no steps, with torch's message.
        """
        x = input.transpose(0, 1) if batch_first else input
        if not x.shape[0]:
            raise ShapeError("Expected sequence length to be larger than 0 in RNN")
        if not isinstance(x, DistTensor):
            direction = partial(_run_direction, Recurrence(self.cell, self.method))
        else:
            direction = partial(_run_distributed, self.cell, self.method)
        y, last = self._run_layers(direction, x, start, weights)
        return y.transpose(0, 1) if batch_first else y, last

    def call_packed(
        self, data: torch.Tensor, batch_sizes: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the last layer and the last states of all layers for the data of a PackedSequence.

        Parameters
        ----------
        data : Tensor or DistTensor
            (sum of lengths, I). It is full on every rank, because torch packs full tensors.
        batch_sizes : Tensor
            Number of samples at each step.
        start, weights
            As in :meth:`__call__`.

        Returns
        -------
        tuple of Tensor
            (sum of lengths, directions * H) and (layers * directions, B, H).
        """
        like = next((t for t in (data, batch_sizes, start, *weights) if isinstance(t, DistTensor)), None)
        # torch packs full tensors, so every rank has all of the data, and computes all of it.
        if like is not None:
            full = [as_distributed(t, like.grid).replicated().local for t in (data, batch_sizes, start, *weights)]
            y, last = self.call_packed(full[0], full[1], full[2], full[3:])
            return as_distributed(y, like.grid), as_distributed(last, like.grid)
        recurrence = Recurrence(self.cell, self.method)
        return self._run_layers(partial(_run_packed, recurrence, batch_sizes), data, start, weights)

    def _run_layers(
        self, direction: Direction, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, directions = 4 if self.bias else 2, 2 if self.bidirectional else 1
        # torch's order: layer by layer, in each the forward direction first; `last_states` grows in the same order.
        groups = [weights[index : index + count] for index in range(0, len(weights), count)]
        last_states: list[torch.Tensor] = []
        for layer in range(self.layers):
            outputs = []
            for reverse in range(directions):
                index = len(last_states)
                y, last = direction(x, start[index], groups[index], reverse=bool(reverse))
                outputs.append(y)
                last_states.append(last)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if layer < self.layers - 1:
                x = F.dropout(x, self.dropout, self.training and self.dropout > 0)
        return x, torch.stack(last_states)


def _run_direction(
    recurrence: Recurrence, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor], *, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y = recurrence(x.flip(0) if reverse else x, start, weights)
    return y.flip(0) if reverse else y, y[-1]


def _run_packed(
    recurrence: Recurrence,
    batch_sizes: torch.Tensor,
    data: torch.Tensor,
    start: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer on padded sequences. Outputs after their ends get no gradient, so no mask is needed."""
    x, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
    ends, samples = lengths.to(data.device), torch.arange(len(lengths), device=data.device)
    positions = torch.arange(len(x), device=data.device)[:, None]
    # Each sample is reversed up to its own end. This is its own inverse, so it also restores the order of outputs.
    reversed_positions = torch.where(positions < ends, ends - 1 - positions, positions)
    y = recurrence(x[reversed_positions, samples] if reverse else x, start, weights)
    last = y[ends - 1, samples]
    return pack_padded_sequence(y[reversed_positions, samples] if reverse else y, lengths).data, last


def _run_distributed(
    cell: RecurrentCell,
    method: Method,
    x: DistTensor,
    start: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer on a DistTensor. Steps and samples stay split, and features are gathered."""
    x = redistribute_balanced(x.replicated([2]))
    axis = x.dist.split[0]
    ranks = None if axis is None else TimeRanks(x.grid, axis, -(-x.shape[0] // x.grid.shape[axis]), reverse)
    shape = torch.Size((*x.shape[:2], start.shape[1]))
    own = broadcast_block(start, x.dist, shape)
    local = x.local.flip(0) if reverse else x.local
    y = Recurrence(cell, method, ranks)(local, own, [replicate_parameter(weight, x.dist) for weight in weights])
    # Steps are reversed within each block, and TimeRanks reverses the order of ranks.
    outputs = DistTensor(y.flip(0) if reverse else y, x.dist, shape)
    return outputs, outputs[0 if reverse else -1]


def run_recurrent(cell: RecurrentCell, method: Method, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torch's recurrent function of a cell with another backward pass.

    Collective for DistTensors: call on every rank.

    Parameters
    ----------
    cell : RecurrentCell
    method : Method
    *args
        As ``nn.RNN`` and ``nn.GRU`` pass them by position: (input, hx, weights, bias, layers, dropout, train,
        bidirectional, batch_first), or for packed sequences (data, batch_sizes, hx, weights, bias, layers, dropout,
        train, bidirectional).

    Returns
    -------
    tuple of Tensor
        As the function of torch.
    """
    if isinstance(args[2], torch.Tensor):
        data, batch_sizes, start, weights, *options = args
        return RecurrentStack(cell, method, *options).call_packed(data, batch_sizes, start, weights)
    input, start, weights, *options, batch_first = args
    return RecurrentStack(cell, method, *options)(input, start, weights, batch_first)
