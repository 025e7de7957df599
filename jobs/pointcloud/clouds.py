"""A labelled cloud, and what any set of them offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points float32 (P, 3), the class of the shape, and the part that each point belongs to, int64 (P), if known."""

    points: NDArray[np.float32]
    label: int
    part: NDArray[np.int64] | None = None


class Clouds(Protocol):
    """Clouds by index, all of ``points`` points; a cloud is the same whenever and on whichever rank it is asked for."""

    points: int

    @property
    def class_names(self) -> tuple[str, ...]:
        """What a label means."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """What the part of a point means; empty where the clouds have no parts."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Classes of all clouds (N)."""

    def __getitem__(self, index: int) -> Cloud:
        """One cloud. Local; may run in another thread."""
