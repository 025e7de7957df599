"""How a recurrent layer goes back through time, and which way is the fastest.

The costs are those of a scan by Algorithm 1 (BPPSA, 3.6) beside those of going back step after step. A scan does H
times the arithmetic, so over ranks it pays from about H of them on; on one it pays where a step is so little work that
what is spent is calls: on a GPU, or without the compiled loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from distconv.errors import UnsupportedOperation
from distconv.kernels.recurrence import is_compiled


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
        """True if it needs the Jacobians themselves."""
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
        names = ", ".join(repr(method.value) for method in Method)
        raise UnsupportedOperation(f"method={name!r}: a recurrent layer goes back by one of {names}") from None


@dataclass(frozen=True)
class BackwardSpeed:
    """How fast a device goes back through time without a compiled loop, in seconds and operations a second."""

    step_s: float
    """A step by separate calls."""
    alone_s: float
    """A step on one rank, which torch itself may take: on a GPU cuDNN."""
    call_s: float
    """Any call on a whole level of a scan."""
    flops_per_s: float


SPEEDS = {"cpu": BackwardSpeed(8e-6, 8e-6, 10e-6, 10e9), "cuda": BackwardSpeed(20e-6, 0.7e-6, 90e-6, 5e12)}
"""One core of a small machine, measured. Of an H200 what one rank's steps and a scan's calls take is fitted to whole
steps (docs/evidence/scan.md); separate calls and arithmetic are assumed."""


@dataclass(frozen=True)
class BackwardProblem:
    """What the time of going back depends on: ``steps`` and samples (``batch``) of one rank, and so many ``ranks``."""

    steps: int
    batch: int
    width: int
    gates: int
    ranks: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class BackwardPrediction:
    """Seconds of going back step after step, and of a scan, on all ranks together."""

    sequential_s: float
    scan_s: float


def predict(problem: BackwardProblem) -> BackwardPrediction:
    """What going back takes without a compiled loop, and behind it what follows for a scan.

    Step after step, ranks wait for one another; a scan forms and multiplies matrices, but on all of them at once.
    """
    speed = SPEEDS["cuda" if problem.device.type == "cuda" else "cpu"]
    vector = 2 * problem.batch * problem.width**2
    step_s = speed.alone_s if problem.ranks == 1 else speed.step_s
    sequential = problem.steps * problem.ranks * (step_s + problem.gates * vector / speed.flops_per_s)
    levels = max(1, problem.steps - 1).bit_length() + (problem.ranks - 1).bit_length()
    # Forming a Jacobian is a pass over its gates; the up-sweep has a product of matrices for each step.
    work = problem.steps * vector * (problem.width + problem.gates + 2)
    return BackwardPrediction(sequential, 4 * levels * speed.call_s + work / speed.flops_per_s)


def fastest(problem: BackwardProblem) -> Method:
    """The method that should take the least time.

    A compiled loop has no calls to save, so a scan could only win by its arithmetic, which is more: on one rank always,
    on several up to about as many as a state has values.
    """
    prediction = predict(problem)
    if is_compiled(problem.device, problem.dtype, problem.width):
        return Method.SEQUENTIAL if problem.ranks < 2 * problem.width else Method.BLELLOCH
    if prediction.scan_s < prediction.sequential_s:
        return Method.BLELLOCH
    # cuDNN goes back by itself, but not over ranks.
    return Method.AUTOGRAD if problem.device.type == "cuda" and problem.ranks == 1 else Method.SEQUENTIAL
