"""Sequential backward pass of a recurrence: compiled by numba if it is installed, otherwise with torch.

A step of a recurrent layer takes the state h to h'. With g = dl/dh' and the derivatives of the step's gates, its
transposed Jacobian is applied without being formed: v = g * direct + sum over gates of W_gate^T (g * factor_gate). v is
the gradient that the step passes to the state before it.

:mod:`distconv.layers.recurrent` calls this module on local blocks. It contains no communication.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

MAX_COMPILED_SIZE = 96
"""Hidden size up to which the compiled loop is used. For larger ones a call of BLAS in each step is faster."""

_ROWS = 4
"""Rows of the weights that are added to the result at once, which saves loads and stores of it."""


def backpropagate_steps(
    carry: torch.Tensor,
    sources: torch.Tensor,
    factors: torch.Tensor,
    direct: torch.Tensor | None,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the states after each step, and of the state before the first.

    From the last step to the first: g_t = sources_t + v_{t+1}, and v_t = g_t * direct_t + (g_t * factors_t) weight.

    Parameters
    ----------
    carry : Tensor
        v after the last step (B, H).
    sources : Tensor
        Gradients of the states from outside of the recurrence (T, B, H).
    factors : Tensor
        Derivatives of the states by the gates' hidden parts (T, B, G, H).
    direct : Tensor or None
        Derivatives of the states by the previous states that bypass the gates (T, B, H); None if there are none.
    weight : Tensor
        Hidden weights (G * H, H), gate after gate.

    Returns
    -------
    tuple of Tensor
        g (T, B, H), and v before the first step (B, H).
    """
    if is_compiled(sources.device, sources.dtype, sources.shape[-1]):
        return _run_numba(carry, sources, factors, direct, weight)
    return _run_torch(carry, sources, factors, direct, weight)


def is_compiled(device: torch.device, dtype: torch.dtype, hidden: int) -> bool:
    """Return True if the compiled loop is used.

    Parameters
    ----------
    device : torch.device
        The device of the states.
    dtype : torch.dtype
        The dtype of the states.
    hidden : int
        Number of values of a state.
    """
    fits = dtype in (torch.float32, torch.float64) and hidden <= MAX_COMPILED_SIZE
    return fits and device.type == "cpu" and importlib.util.find_spec("numba") is not None


def _run_torch(
    carry: torch.Tensor, sources: torch.Tensor, factors: torch.Tensor, direct: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # A copy: v changes in each step, and the carry belongs to the caller.
    gradients, v = torch.empty_like(sources), carry.clone()
    gates = factors.new_empty(factors.shape[1:])
    # A view: the products that are written to `gates` are its rows.
    rows = gates.flatten(1)
    bypasses = [None] * len(sources) if direct is None else direct.unbind(0)
    steps = list(zip(sources.unbind(0), factors.unbind(0), bypasses, gradients.unbind(0), strict=True))
    for source, factor, bypass, g in reversed(steps):
        torch.add(source, v, out=g)
        torch.mul(g[:, None], factor, out=gates)
        if bypass is None:
            torch.mm(rows, weight, out=v)
        else:
            torch.mul(g, bypass, out=v).addmm_(rows, weight)
    return gradients, v


def _run_numba(
    carry: torch.Tensor, sources: torch.Tensor, factors: torch.Tensor, direct: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _, batch, hidden = sources.shape
    # numba takes no None. An array without steps stands for it.
    bypass = sources.new_empty(0, batch, hidden) if direct is None else direct
    gradients, v = torch.empty_like(sources, memory_format=torch.contiguous_format), carry.clone().contiguous()
    operands = (v, sources, factors, bypass, weight.unflatten(0, (-1, hidden)), gradients)
    # v and gradients are contiguous, so NumPy has their own memory, and the loop writes to them and not to copies.
    _compiled_loop()(*(tensor.detach().contiguous().numpy() for tensor in operands))
    return gradients, v


@cache
def _compiled_loop() -> Any:
    numba: Any = importlib.import_module("numba")
    # Products may be fused with sums, as in BLAS. Other options of fast-math would change infinities and NaN.
    return numba.njit(cache=True, error_model="numpy", fastmath={"contract"}, nogil=True)(_loop)


def _loop(  # noqa: PLR0917 - what numba compiles is called by position
    carry: Any, sources: Any, factors: Any, direct: Any, weight: Any, gradients: Any
) -> None:
    steps, batch, gates, hidden = factors.shape
    # The rest of the rows, of which there are fewer than _ROWS, is added one by one.
    blocked = hidden - hidden % _ROWS
    # Steps in the outer loop, samples in the inner one, so that memory is read consecutively.
    for t in range(steps - 1, -1, -1):
        for b in range(batch):
            v, g = carry[b], gradients[t, b]
            for j in range(hidden):
                g[j] = sources[t, b, j] + v[j]
                v[j] = g[j] * direct[t, b, j] if direct.shape[0] else 0
            for gate in range(gates):
                factor, rows = factors[t, b, gate], weight[gate]
                for k in range(0, blocked, _ROWS):
                    d0, d1 = g[k] * factor[k], g[k + 1] * factor[k + 1]
                    d2, d3 = g[k + 2] * factor[k + 2], g[k + 3] * factor[k + 3]
                    for j in range(hidden):
                        v[j] += d0 * rows[k, j] + d1 * rows[k + 1, j] + d2 * rows[k + 2, j] + d3 * rows[k + 3, j]
                for k in range(blocked, hidden):
                    d0 = g[k] * factor[k]
                    for j in range(hidden):
                        v[j] += d0 * rows[k, j]
