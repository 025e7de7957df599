"""Transposed Jacobians of what works element by element: diagonal matrices. And of a linear layer: its weight.

Source: BPPSA, D.2.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .csr import Pattern, SparseJacobian


def relu(x: torch.Tensor) -> torch.Tensor:
    """(dy/dx)^T of ``F.relu`` at ``x`` (or its output), any shape, flat: torch CSR, zeros stored where x <= 0."""
    return batched_relu(x[None]).to_torch()


def tanh(y: torch.Tensor) -> torch.Tensor:
    """(dy/dx)^T of ``torch.tanh`` by its output ``y``, any shape, flat: torch CSR."""
    return batched_tanh(y[None]).to_torch()


def linear(weight: torch.Tensor) -> torch.Tensor:
    """(dy/dx)^T of ``F.linear`` with ``weight`` (out, in): its transpose, torch CSR without what is zero.

    A scan takes ``weight.t()`` as it is, which is better for weights that are not pruned.
    """
    pattern, order = _places(tuple(weight.shape), (weight != 0).cpu().numpy().tobytes(), str(weight.device))
    return SparseJacobian(pattern, weight.detach().reshape(1, -1).index_select(1, order)).to_torch()


def batched_relu(x: torch.Tensor) -> SparseJacobian:
    """That of each sample of ``x`` (B, ...)."""
    return _diagonal((x > 0).to(x.dtype))


def batched_tanh(y: torch.Tensor) -> SparseJacobian:
    """That of each sample of ``y`` (B, ...)."""
    return _diagonal(1 - y * y)


def _diagonal(values: torch.Tensor) -> SparseJacobian:
    rows = values.detach().flatten(1)
    return SparseJacobian(_diagonal_pattern(rows.shape[1], str(values.device)), rows)


@lru_cache(maxsize=64)
def _diagonal_pattern(size: int, device: str) -> Pattern:
    return Pattern(torch.arange(size + 1, device=device), torch.arange(size, device=device), (size, size))


@lru_cache(maxsize=16)
def _places(shape: tuple[int, ...], kept: bytes, device: str) -> tuple[Pattern, torch.Tensor]:
    places = torch.frombuffer(bytearray(kept), dtype=torch.bool).to(device).nonzero()[:, 0]
    pattern, order = Pattern.of(places % shape[1], places // shape[1], (shape[1], shape[0]))
    return pattern, places[order]
