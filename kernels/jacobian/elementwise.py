"""Transposed Jacobians of elementwise layers, which are diagonal, and of a linear layer, which is its weight.

Source: BPPSA, D.2.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .csr import Pattern, SparseJacobian


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return (dy/dx)^T of ``F.relu`` at ``x`` (or its output), flattened: torch CSR, with stored zeros for x <= 0."""
    return batched_relu(x[None]).to_torch()


def tanh(y: torch.Tensor) -> torch.Tensor:
    """Return (dy/dx)^T of ``torch.tanh``, given its output ``y``, flattened: torch CSR."""
    return batched_tanh(y[None]).to_torch()


def linear(weight: torch.Tensor) -> torch.Tensor:
    """Return (dy/dx)^T of ``F.linear`` with ``weight`` (out, in): its transpose, torch CSR without zeros.

    For weights that are not pruned, pass ``weight.t()`` to a scan instead, which is faster.
    """
    pattern, order = _positions(tuple(weight.shape), (weight != 0).cpu().numpy().tobytes(), str(weight.device))
    return SparseJacobian(pattern, weight.detach().reshape(1, -1).index_select(1, order)).to_torch()


def batched_relu(x: torch.Tensor) -> SparseJacobian:
    """Return (dy/dx)^T of ``F.relu`` for each sample of ``x`` (B, ...)."""
    # 0 at x = 0, as torch's gradient.
    return _diagonal((x > 0).to(x.dtype))


def batched_tanh(y: torch.Tensor) -> SparseJacobian:
    """Return (dy/dx)^T of ``torch.tanh`` for each sample of its output ``y`` (B, ...)."""
    return _diagonal(1 - y * y)


def _diagonal(values: torch.Tensor) -> SparseJacobian:
    rows = values.detach().flatten(1)
    return SparseJacobian(_diagonal_pattern(rows.shape[1], str(values.device)), rows)


@lru_cache(maxsize=64)
def _diagonal_pattern(size: int, device: str) -> Pattern:
    return Pattern(torch.arange(size + 1, device=device), torch.arange(size, device=device), (size, size))


@lru_cache(maxsize=16)
def _positions(shape: tuple[int, ...], kept: bytes, device: str) -> tuple[Pattern, torch.Tensor]:
    # A copy, since torch warns of a buffer that cannot be written to.
    positions = torch.frombuffer(bytearray(kept), dtype=torch.bool).to(device).nonzero()[:, 0]
    pattern, order = Pattern.from_positions(positions % shape[1], positions // shape[1], (shape[1], shape[0]))
    return pattern, positions[order]
