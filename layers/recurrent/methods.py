"""How a recurrent layer goes back through time, and which way is the fastest.

The costs are those of a scan by Algorithm 1 (BPPSA, 3.6) beside those of going back step after step. On p ranks with
T / p steps each a scan does H times the arithmetic of a vector on every rank, so it pays from about H ranks on, or
where a step is so little work that a device waits: a GPU that takes its kernels one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from distconv.errors import UnsupportedOperation
from distconv.kernels.recurrence import compiled


class Method(Enum):
    """A way back through time."""

    AUTO = "auto"
    """The one that should be the fastest."""
    AUTOGRAD = "autograd"
    """Torch's own backward."""
    SEQUENTIAL = "sequential"
    """Step after step, compiled where numba is installed."""
    BLELLOCH = "blelloch"
    """Algorithm 1."""
    TRUNCATED = "truncated"
    """Algorithm 1 with a linear scan in place of its upper levels."""

    @property
    def scans(self) -> bool:
        """Whether it needs the Jacobians themselves."""
        return self in (Method.BLELLOCH, Method.TRUNCATED)


def method_named(name: str) -> Method:
    """The method of that name.

    Raises
    ------
    UnsupportedOperation
        If there is none.
    """
    try:
        return Method(name)
    except ValueError:
        known = ", ".join(repr(method.value) for method in Method)
        raise UnsupportedOperation(f"method={name!r}: a recurrent layer goes back by one of {known}") from None


@dataclass(frozen=True)
class Problem:
    """What the time of going back depends on; ``steps`` are those of one rank, and compile those that numba takes."""

    steps: int
    batch: int
    width: int
    gates: int
    ranks: int
    device: torch.device
    dtype: torch.dtype


def fastest(problem: Problem) -> Method:
    """The method that should take the least time."""
    return Method.SEQUENTIAL
