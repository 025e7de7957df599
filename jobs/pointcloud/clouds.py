"""A labelled cloud, and the interface of a set of clouds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points float32 (P, 3), the class of the shape, and the part of each point, int64 (P), if known."""

    points: NDArray[np.float32]
    label: int
    part: NDArray[np.int64] | None = None


class Clouds(Protocol):
    """Interface of a set of clouds with ``points`` points each.

    A cloud depends on its index alone: it is identical at every access and on every rank.
    """

    points: int

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Name of each part; empty if the clouds have no parts."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Classes of all clouds (N)."""

    def __getitem__(self, index: int) -> Cloud:
        """Return one cloud. Local; may be called from another thread."""
