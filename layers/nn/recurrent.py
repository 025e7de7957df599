"""Recurrent layers and cells, split over samples; RNN and GRU also over time.

If time is split, each rank sends the hidden state to the next one; see ``distconv.layers.recurrent``. ``nn.LSTM``
gathers the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import StridePolicy, implements
from distconv.distribution import Distribution
from distconv.errors import NoRule
from distconv.layers.common.alignment import (
    all_to_all_transpose,
    as_distributed,
    broadcast_block,
    first_grid,
    replicate_parameter,
)
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape
from distconv.layers.recurrent.cells import CELLS
from distconv.layers.recurrent.methods import Method
from distconv.layers.recurrent.stack import run_recurrent
from distconv.tensor import DistTensor

for _cell in CELLS.values():
    implements(_cell.function, order=StridePolicy.NEW, tensors=None, passes=None)(
        partial(run_recurrent, _cell, Method.AUTO)
    )


# -- LSTM -------------------------------------------------------------------------------------------------------------


@implements(torch.lstm, order=StridePolicy.NEW, tensors=None, passes=None)
def lstm(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``torch.lstm`` of sequences of one length, split over samples.

    Parameters
    ----------
    *args
        As in ``torch.lstm``, by position.

    Returns
    -------
    tuple of DistTensor
        All states, and the last hidden and cell states.

    Raises
    ------
    NoRule
        For packed sequences.
    """
    if isinstance(args[1], torch.Tensor):
        raise NoRule(
            "nn.LSTM of a packed sequence has no distributed rule: pass the padded sequence, and mask the positions "
            "after the ends"
        )
    input, states, weights, bias, layers, dropout, training, bidirectional, batch_first = args
    if not isinstance(input, DistTensor):
        input = as_distributed(input, first_grid(*states, *weights))
    drops = training and dropout > 0 and layers > 1
    if not drops:
        return _call_lstm(input, states, weights, (bias, layers, 0.0, training, bidirectional, batch_first))
    # Layer by layer, because a single process draws a mask for all samples after each layer except the last.
    x: Any = input.transpose(0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    count, last_states = len(weights) // layers, []
    for layer in range(layers):
        start = [state[layer * directions : (layer + 1) * directions] for state in states]
        layer_weights = weights[layer * count : (layer + 1) * count]
        x, *last = _call_lstm(x, start, layer_weights, (bias, 1, 0.0, training, bidirectional, False))
        last_states.append(last)
        if layer < layers - 1:
            x = F.dropout(x, dropout, True)
    hidden, cell = (torch.cat(each) for each in zip(*last_states, strict=True))
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _call_lstm(
    input: DistTensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], options: tuple[Any, ...]
) -> tuple[DistTensor, DistTensor, DistTensor]:
    """Call ``torch.lstm`` without dropout on complete sequences of this rank's samples. Collective."""
    # options[-1] is batch_first.
    samples, time = (0, 1) if options[-1] else (1, 0)
    x = all_to_all_transpose(input, [time, 2])
    state_dist = x.dist.with_axes((None, x.dist.axes[samples], None))
    starts = [broadcast_block(state, state_dist, state.shape) for state in states]
    # A rank without samples computes one sample of zeros, so that its graph is that of the other ranks.
    blocks = pad_to_minimum_shape(x.local, (1, 1, 1)), tuple(pad_to_minimum_shape(start, (1, 1, 1)) for start in starts)
    y, *ends = torch.lstm(*blocks, [replicate_parameter(weight, x.dist) for weight in weights], *options)
    y = _wrap_block(y, x.dist, (*x.shape[:2], y.shape[2]))
    hidden, cell = (_wrap_block(end, state_dist, (end.shape[0], x.shape[samples], end.shape[2])) for end in ends)
    return y.redistribute(input.dist.with_axes((*input.dist.axes[:2], None))), hidden, cell


def _wrap_block(block: torch.Tensor, dist: Distribution, shape: Sequence[int]) -> DistTensor:
    """Return the DistTensor whose block on this rank is ``block``.

    If the rank has no samples, the result has no elements, but continues the graph of ``block``.
    """
    local_shape = dist.local_shape(shape)
    return DistTensor(connected_zeros(block, local_shape) if 0 in local_shape else block, dist, torch.Size(shape))


# -- cells ------------------------------------------------------------------------------------------------------------


def _cell_step(
    function: Callable[..., Any], input: torch.Tensor, state: Any, *weights: torch.Tensor | None, **named: torch.Tensor
) -> Any:
    """Compute ``torch.lstm_cell`` or another cell of inputs (N, I) and one state (N, H) or two."""
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    operands = [t for t in (input, *states, *weights, *named.values()) if isinstance(t, torch.Tensor)]
    grid = first_grid(*operands)
    x = as_distributed(input, grid)
    if not x.dist.split_axes:  # The input is replicated, but a state may be split.
        x = x.redistribute(Distribution(grid, (as_distributed(states[0], grid).dist.axes[0], None)))
    x = x.replicated([1])
    starts = [pad_to_minimum_shape(broadcast_block(each, x.dist, each.shape), (1, 1)) for each in states]
    blocks = (pad_to_minimum_shape(x.local, (1, 1)), starts[0] if isinstance(state, torch.Tensor) else tuple(starts))
    full_weights = [None if weight is None else replicate_parameter(weight, x.dist) for weight in weights]
    result = function(
        *blocks, *full_weights, **{name: replicate_parameter(weight, x.dist) for name, weight in named.items()}
    )
    if isinstance(result, torch.Tensor):
        return _wrap_block(result, x.dist, (x.shape[0], result.shape[1]))
    return tuple(_wrap_block(each, x.dist, (x.shape[0], each.shape[1])) for each in result)


for _name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
    _function = getattr(torch, _name)
    implements(_function, tensors=None, passes=None)(partial(_cell_step, _function))
