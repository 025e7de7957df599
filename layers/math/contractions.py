"""Contractions by the names and arguments under which opt_einsum looks for them: in the package of an array's class.

Without them it takes NumPy's. TensorLy and neuraloperator contract by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

einsum = torch.einsum


def tensordot(x: torch.Tensor, y: torch.Tensor, axes: Any = 2) -> torch.Tensor:
    """``torch.tensordot`` with NumPy's name for the dimensions."""
    product: torch.Tensor = torch.tensordot(x, y, dims=axes)
    return product


def transpose(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """``x.permute``, as NumPy calls it."""
    return x.permute(*axes)
