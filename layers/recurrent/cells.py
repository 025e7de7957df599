"""The cells: their steps by torch, and the derivatives of many steps at once.

torch computes the states. For backward the gates are recomputed from the states, for all steps at once, because all
states are known by then.

Source: BPPSA, Eq. 9 (RNN), Eqs. 10-11 and appendix E (GRU).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class CellWeights:
    """Parameters of one layer in one direction, for G gates."""

    input: torch.Tensor
    """(G * H, I)."""
    hidden: torch.Tensor
    """(G * H, H)."""
    input_bias: torch.Tensor | None = None
    """(G * H,)."""
    hidden_bias: torch.Tensor | None = None
    """(G * H,)."""


@dataclass(frozen=True)
class StepDerivatives:
    """Derivatives of states h' (T, B, H) by the intermediate results of their steps, for G gates."""

    hidden: torch.Tensor
    """By the gates' hidden parts W_h h + b_h, (T, B, G, H)."""
    input: torch.Tensor
    """By the gates' input parts W_i x + b_i, (T, B, G, H)."""
    direct: torch.Tensor | None = None
    """By the previous state, bypassing the gates, (T, B, H)."""

    def jacobians(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the transposed Jacobians (dh'/dh)^T.

        Source: BPPSA, Eq. 11 and the equations after it.

        Parameters
        ----------
        weight : Tensor
            Hidden weights (G * H, H).

        Returns
        -------
        Tensor
            (T, B, H, H).
        """
        gates = self.hidden.shape[2]
        # Gate by gate into one tensor: the Jacobians are the largest tensors of the backward pass.
        parts = weight.unflatten(0, (gates, -1)).transpose(1, 2)
        jacobians: torch.Tensor = parts[0] * self.hidden[:, :, 0, None]
        for gate in range(1, gates):
            jacobians.addcmul_(parts[gate], self.hidden[:, :, gate, None])
        if self.direct is not None:
            jacobians.diagonal(dim1=-2, dim2=-1).add_(self.direct)
        return jacobians

    def reversed(self) -> StepDerivatives:
        """Return the derivatives of the same steps in reverse order."""
        hidden = self.hidden.flip(0)
        same = self.input is self.hidden
        return StepDerivatives(
            hidden, hidden if same else self.input.flip(0), None if self.direct is None else self.direct.flip(0)
        )


@dataclass(frozen=True)
class RecurrentCell:
    """A kind of recurrent layer."""

    function: Callable[..., Any]
    """The function of torch that computes the layer."""
    gates: int
    """Number of gates G."""
    derivatives: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, CellWeights], StepDerivatives]
    """Returns the derivatives of steps, given inputs (T, B, I), states before and after each step, and the weights."""

    def states(self, x: torch.Tensor, start: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all states as torch computes them.

        Parameters
        ----------
        x : Tensor
            Inputs (T, B, I).
        start : Tensor
            State before the first step (B, H).
        weights : sequence of Tensor
            In torch's order.

        Returns
        -------
        Tensor
            (T, B, H).
        """
        # cuDNN supports backward only for a forward pass in training mode.
        options = (len(weights) == 4, 1, 0.0, torch.is_grad_enabled(), False, False)
        with warnings.catch_warnings():
            # The weights of one layer lie among those of other layers, about which torch warns.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            y: torch.Tensor = self.function(x, start[None].contiguous(), [*map(_with_own_memory, weights)], *options)[0]
        return y


def _with_own_memory(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` in its own memory on a GPU, where cuDNN copies it anyway.

    For one layer's weights without biases that share memory with the weights of other layers, torch's function would
    use those of the first layer.
    """
    shares_memory = weight.is_cuda and weight.untyped_storage().nbytes() > weight.nbytes
    return weight.clone() if shares_memory else weight


def _tanh_derivatives(
    x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, weights: CellWeights
) -> StepDerivatives:
    # tanh' = 1 - h'^2, from the stored state (Eq. 9).
    slope = torch.addcmul(torch.ones_like(after), after, after, value=-1)[:, :, None]
    return StepDerivatives(slope, slope)


def _relu_derivatives(
    x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, weights: CellWeights
) -> StepDerivatives:
    slope = (after > 0).to(after.dtype)[:, :, None]
    return StepDerivatives(slope, slope)


def _gru_derivatives(
    x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, weights: CellWeights
) -> StepDerivatives:
    # Gates r, z, n in torch's order, recomputed for all steps by two products. m is the hidden part of n.
    from_input = F.linear(x, weights.input, weights.input_bias).unflatten(2, (3, -1))
    from_hidden = F.linear(before, weights.hidden, weights.hidden_bias).unflatten(2, (3, -1))
    r, z = (from_input[:, :, :2] + from_hidden[:, :, :2]).sigmoid_().unbind(2)
    m = from_hidden[:, :, 2]
    n = torch.addcmul(from_input[:, :, 2], r, m).tanh_()
    by_n = (1 - z) * (1 - n * n)  # j7 * j6
    by_z = (before - n) * z * (1 - z)  # j10 * j9
    by_r = by_n * m * r * (1 - r)  # j3 * j2
    # The hidden part of n is multiplied by r, its input part is not.
    input = torch.stack([by_r, by_z, by_n], 2)
    return StepDerivatives(torch.stack([by_r, by_z, by_n * r], 2), input, z)


CELLS = {
    "rnn_tanh": RecurrentCell(torch.rnn_tanh, 1, _tanh_derivatives),
    "rnn_relu": RecurrentCell(torch.rnn_relu, 1, _relu_derivatives),
    "gru": RecurrentCell(torch.gru, 3, _gru_derivatives),
}
"""Cells by the names of torch's functions."""
