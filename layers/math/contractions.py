"""Contractions under the names that opt_einsum looks up.

opt_einsum looks for them in the package of an array's class, and uses NumPy's otherwise. TensorLy and neuraloperator
contract by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

einsum = torch.einsum
"""``torch.einsum``, whose operator handles DistTensors."""


def tensordot(x: torch.Tensor, y: torch.Tensor, axes: Any = 2) -> torch.Tensor:
    """Compute ``torch.tensordot`` with NumPy's name for the dimensions.

    Parameters
    ----------
    x, y : Tensor
    axes : int or pair of sequence of int
        As ``dims`` of ``torch.tensordot``.

    Returns
    -------
    Tensor
    """
    product: torch.Tensor = torch.tensordot(x, y, dims=axes)
    return product


def transpose(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Permute the dimensions of a tensor, as NumPy's ``transpose``.

    Parameters
    ----------
    x : Tensor
    axes : sequence of int

    Returns
    -------
    Tensor
    """
    return x.permute(*axes)
