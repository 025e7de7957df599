"""Backpropagation of one gradient through a chain of transposed Jacobians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from distconv.kernels.jacobian.csr import SparseJacobian

from .algorithm import scan
from .elements import Affine, Chain, Identity, Level, Stack

Method = Literal["linear", "blelloch", "truncated", "auto"]
Jacobian = torch.Tensor | SparseJacobian | Identity


@torch.no_grad()
def backpropagate(
    gradient: torch.Tensor,
    jacobians: torch.Tensor | Sequence[Jacobian],
    method: Method = "auto",
    comm: Any = None,
    *,
    sources: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    depth: int | None = None,
) -> Any:
    """The gradients of x_{n-1}, ..., x_0: a tensor (n, B, N) for Jacobians in one tensor, else a list of (B, N_i).

    Parameters
    ----------
    gradient
        dl/dx_n (B, N).
    jacobians
        Transposed, the last layer's first, as in Eq. 5: (dx_n/dx_{n-1})^T, ..., (dx_1/dx_0)^T. One dense tensor
        (n, B, N, N), or (n, 1, N, N) where all samples have the same; or a sequence of dense (B, N_in, N_out) or
        (N_in, N_out), torch CSR (N_in, N_out), :class:`~distconv.kernels.jacobian.SparseJacobian` and
        :class:`Identity`.
    sources
        What enters the gradients of x_{n-1}, ..., x_0 from outside, shaped like the result (in a list None where
        nothing does): g_{i-1} = J_i g_i + s_{i-1}.
    method
        ``"linear"`` one product after another; ``"blelloch"`` Algorithm 1; ``"truncated"`` Algorithm 1 with ``depth``
        levels of up-sweep and linear above them.

    Source: BPPSA, Eqs. 3-5, algorithm 1.
    """
    level = _level(jacobians, sources)
    levels = {"linear": 0, "blelloch": None, "truncated": depth, "auto": 0}[method]
    vectors = scan(gradient, level[:-1], levels)
    last = level[len(level) - 1](vectors[-1] if len(vectors) else gradient)
    return level.join([vectors, last[None]])


def _level(jacobians: torch.Tensor | Sequence[Jacobian], sources: Any) -> Level:
    if isinstance(jacobians, torch.Tensor):
        return Stack(jacobians, sources)
    shifts = [None] * len(jacobians) if sources is None else sources
    return Chain([Affine(_matrix(j), s) for j, s in zip(jacobians, shifts, strict=True)])


def _matrix(jacobian: Jacobian) -> Jacobian:
    if not isinstance(jacobian, torch.Tensor):
        return jacobian
    if jacobian.layout == torch.sparse_csr:
        return SparseJacobian.from_torch(jacobian)
    return jacobian if jacobian.dim() == 3 else jacobian[None]
