"""Half precision: which dtypes it is, and what sums of them are taken in."""

from __future__ import annotations

import torch

HALF = frozenset((torch.float16, torch.bfloat16))
"""MPI libraries sum these wrongly, silently."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """What partial results of ``dtype`` are in, so that the result is rounded once, as in one process.

    >>> widened(torch.bfloat16), widened(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype
