"""Half precision: the dtypes, and the dtype in which partial results of them are accumulated."""

from __future__ import annotations

import torch

HALF = frozenset((torch.float16, torch.bfloat16))
"""The half-precision dtypes. MPI libraries silently compute wrong sums of them."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for partial results of ``dtype``: the sum is then rounded once, as in a single process.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the operands.

    Returns
    -------
    torch.dtype

    Examples
    --------
    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype
