"""Algorithms of the backward pass through time, and the choice of the fastest.

The costs are those of a scan by Algorithm 1 (BPPSA, 3.6) compared with the sequential backward pass. A scan does H
times the arithmetic. So over ranks it pays from about H ranks. On one rank it pays if a step is so little work that
calls dominate: on a GPU, or without the compiled loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from distconv.errors import UnsupportedOperation
from distconv.kernels.recurrence import is_compiled


class Method(Enum):
    """An algorithm of the backward pass through time."""

    AUTO = "auto"
    """The method that is predicted to be the fastest."""
    AUTOGRAD = "autograd"
    """torch's own backward pass. It cannot be used if the steps are split over ranks."""
    SEQUENTIAL = "sequential"
    """One step after the other, compiled on a CPU if numba is installed."""
    BLELLOCH = "blelloch"
    """Algorithm 1 of BPPSA, a scan over the steps."""
    TRUNCATED = "truncated"
    """Algorithm 1 with a linear scan instead of its upper levels."""

    @property
    def scans(self) -> bool:
        """True if the method needs Jacobians."""
        return self in (Method.BLELLOCH, Method.TRUNCATED)


def parse_method(name: str) -> Method:
    """Return the method with a name.

    Parameters
    ----------
    name : str

    Returns
    -------
    Method

    Raises
    ------
    UnsupportedOperation
        If there is no such method.
    """
    try:
        return Method(name)
    except ValueError:
        names = ", ".join(repr(method.value) for method in Method)
        raise UnsupportedOperation(f"method={name!r}: no such method. Choose one of {names}.") from None


@dataclass(frozen=True)
class BackwardSpeed:
    """Speed of the backward pass through time on a device without a compiled loop."""

    step_s: float
    """Time of a step by separate calls, in seconds."""
    single_rank_step_s: float
    """Time of a step on one rank, where torch may compute it (cuDNN on a GPU), in seconds."""
    call_s: float
    """Time of a call on one level of a scan, in seconds."""
    flops_per_s: float
    """Arithmetic operations per second."""


SPEEDS = {"cpu": BackwardSpeed(8e-6, 8e-6, 10e-6, 10e9), "cuda": BackwardSpeed(20e-6, 0.7e-6, 90e-6, 5e12)}
"""Speeds by device type.

For a CPU measured on one core of a small machine. For a GPU, ``single_rank_step_s`` and ``call_s`` are fitted to
backward passes on an H200 (docs/evidence/scan-gpu.md); ``step_s`` and ``flops_per_s`` are assumed.
"""


@dataclass(frozen=True)
class BackwardProblem:
    """The sizes that determine the time of a backward pass."""

    steps: int
    """Steps on one rank."""
    batch: int
    """Samples on one rank."""
    width: int
    """Values of a state (H)."""
    gates: int
    """Gates of the cell (G)."""
    ranks: int
    """Ranks among which the steps are split."""
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class BackwardPrediction:
    """Predicted times of the sequential backward pass and of a scan, on all ranks, in seconds."""

    sequential_s: float
    scan_s: float


def predict_times(problem: BackwardProblem) -> BackwardPrediction:
    """Predict the time of the backward pass without a compiled loop.

    In the sequential method ranks wait for one another. A scan forms and multiplies matrices, but on all ranks at once.

    Parameters
    ----------
    problem : BackwardProblem

    Returns
    -------
    BackwardPrediction
    """
    speed = SPEEDS["cuda" if problem.device.type == "cuda" else "cpu"]
    vector = 2 * problem.batch * problem.width**2
    step_s = speed.single_rank_step_s if problem.ranks == 1 else speed.step_s
    sequential = problem.steps * problem.ranks * (step_s + problem.gates * vector / speed.flops_per_s)
    levels = max(1, problem.steps - 1).bit_length() + (problem.ranks - 1).bit_length()
    # Forming a Jacobian is a pass over its gates; the up-sweep has a product of matrices for each step.
    work = problem.steps * vector * (problem.width + problem.gates + 2)
    return BackwardPrediction(sequential, 4 * levels * speed.call_s + work / speed.flops_per_s)


def fastest_method(problem: BackwardProblem) -> Method:
    """Return the method that is predicted to be the fastest.

    A compiled loop has no overhead of calls, and a scan does more arithmetic. So the loop is faster unless there are at
    least twice as many ranks as a state has values.

    Parameters
    ----------
    problem : BackwardProblem

    Returns
    -------
    Method
    """
    prediction = predict_times(problem)
    if is_compiled(problem.device, problem.dtype, problem.width):
        return Method.SEQUENTIAL if problem.ranks < 2 * problem.width else Method.BLELLOCH
    if prediction.scan_s < prediction.sequential_s:
        return Method.BLELLOCH
    # cuDNN computes the backward pass of one rank only.
    return Method.AUTOGRAD if problem.device.type == "cuda" and problem.ranks == 1 else Method.SEQUENTIAL
