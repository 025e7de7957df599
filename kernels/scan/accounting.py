"""Record of the products of a scan: matrix by vector or by matrix, phase, level and FLOP.

Source: BPPSA, 5.3 and figure 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Kind = Literal["mv", "mm"]


@dataclass(frozen=True)
class Step:
    """Products of one kind and size."""

    phase: str
    """``"up-sweep"`` and ``"down-sweep"``, also ``"... over ranks"``: products of a level may run at once.

    ``"linear"``: one after another. ``"last"`` and ``"total"``: products with the last element, and of a rank's own
    elements for the scan over ranks.
    """
    level: int
    """Level of the sweep, from 0; 0 for the other phases."""
    kind: Kind
    """``"mv"`` for matrix times vector, ``"mm"`` for matrix times matrix."""
    flops: int
    """FLOP of each product, of all samples."""
    count: int = 1
    """Number of products."""


_recordings: list[list[Step]] = []
_stage = ("linear", 0)
"""Phase and level of the products that are computed next (:func:`set_stage`)."""


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Record the steps of this rank's scans in a ``with`` block.

    ::

        with recorded() as steps:
            backpropagate(gradient, jacobians, "blelloch")
        print(sum(step.flops * step.count for step in steps))
    """
    steps: list[Step] = []
    _recordings.append(steps)
    try:
        yield steps
    finally:
        # Not remove(), which compares by equality: blocks within each other may have equal steps.
        _recordings[:] = [each for each in _recordings if each is not steps]


def set_stage(phase: str, level: int = 0) -> None:
    """Set the phase and the level of the products that follow.

    Parameters
    ----------
    phase : str
        As in :class:`Step`.
    level : int
        Level of the sweep.
    """
    global _stage
    _stage = (phase, level)


def record_products(kind: Kind, flops: int, count: int = 1) -> None:
    """Record products, in all :func:`recorded` blocks.

    Parameters
    ----------
    kind, flops, count
        As in :class:`Step`.
    """
    if count:
        for steps in _recordings:
            steps.append(Step(*_stage, kind, flops, count))


def critical_path(steps: Sequence[Step]) -> list[Step]:
    """Return the steps on the critical path: all linear ones, and the largest one of each level of other phases.

    Phase ``"total"`` counts as one level, although its products depend on one another. So for a scan over ranks the
    path is a lower bound.

    Parameters
    ----------
    steps : sequence of Step
        All steps of a scan.

    Returns
    -------
    list of Step
        In the same order.
    """
    path: list[Step] = []
    # Consecutive steps only: a phase may occur again in another scan.
    for (phase, _), level in groupby(steps, lambda step: (step.phase, step.level)):
        if phase == "linear":
            path += level
        else:
            largest = max(level, key=lambda step: step.flops)
            path.append(Step(phase, largest.level, largest.kind, largest.flops))
    return path
