"""What a scan computes, step by step: matrix by vector or by matrix, in which phase and level, and its FLOP.

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
    """``count`` products of one ``kind`` with ``flops`` each, of all samples.

    Those of a level of ``phase`` ("up-sweep" or "down-sweep") may run at the same time; of "linear" each waits for the
    one before.
    """

    phase: str
    level: int
    kind: Kind
    flops: int
    count: int = 1


_recordings: list[list[Step]] = []
_stage = ("linear", 0)


@contextmanager
def record_steps() -> Iterator[list[Step]]:
    """The steps of the scans inside, on this rank.

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
        _recordings.remove(steps)


def set_stage(phase: str, level: int = 0) -> None:
    """What follows belongs to this level of this phase."""
    global _stage
    _stage = (phase, level)


def record_products(kind: Kind, flops: int, count: int = 1) -> None:
    """Write down ``count`` products of ``flops`` each."""
    if count:
        for steps in _recordings:
            steps.append(Step(*_stage, kind, flops, count))


def critical_path(steps: Sequence[Step]) -> list[Step]:
    """The steps on the longest path through FLOP: all linear ones, of each level of a sweep the largest one."""
    path: list[Step] = []
    for (phase, _), level in groupby(steps, lambda step: (step.phase, step.level)):
        if phase == "linear":
            path += level
        else:
            largest = max(level, key=lambda step: step.flops)
            path.append(Step(phase, largest.level, largest.kind, largest.flops))
    return path
