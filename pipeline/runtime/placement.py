"""Which ranks run which stage: stage after stage, its replicas one after the other, each on its own grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from distconv.arrangement import Arrangement
from distconv.errors import GridError


class Place(NamedTuple):
    """Where a rank is: its stage, which replica of it, and its rank in that replica's grid."""

    stage: int
    replica: int
    member: int


class Placement:
    """The ranks of every stage. ``replicas`` counts and ``grids`` (extents by axis; None: one rank) per stage.

    Raises
    ------
    GridError
        If the numbers of stages differ, or ``ranks`` is not the number of ranks that all stages need.
    """

    def __init__(
        self, ranks: int, replicas: Sequence[int], grids: Sequence[Mapping[str, int] | None] | None = None
    ) -> None:
        stages = len(replicas)
        if grids is not None and len(grids) != stages:
            raise GridError(f"pipeline: {len(grids)} grids for {stages} stages; give one (or None) for each")
        self.replicas = tuple(replicas)
        self.grids = [Arrangement(**(grid or {})) for grid in (grids or [None] * stages)]
        needed = sum(count * grid.size for count, grid in zip(self.replicas, self.grids, strict=True))
        if needed != ranks:
            listed = " + ".join(
                f"{count} x ({grid.describe()})" if grid.size > 1 else str(count)
                for count, grid in zip(self.replicas, self.grids, strict=True)
            )
            raise GridError(
                f"pipeline: {stages} stages need {listed} = {needed} ranks, but the communicator has {ranks}; "
                f"start {needed} ranks or change stages, replicas or grids"
            )

    @cached_property
    def places(self) -> list[Place]:
        """The place of every rank."""
        return [
            Place(stage, replica, member)
            for stage, (count, grid) in enumerate(zip(self.replicas, self.grids, strict=True))
            for replica in range(count)
            for member in range(grid.size)
        ]

    def ranks(self, stage: int, microbatch: int) -> range:
        """The ranks of the replica of ``stage`` that has a micro-batch, in the order of its grid."""
        first = self._first[stage, microbatch % self.replicas[stage]]
        return range(first, first + self.grids[stage].size)

    @cached_property
    def _first(self) -> dict[tuple[int, int], int]:
        """The first rank of every replica."""
        return {(place.stage, place.replica): rank for rank, place in enumerate(self.places) if place.member == 0}
