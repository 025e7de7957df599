"""Which ranks run which stage: stage after stage, its replicas one after the other, each on its own grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import nn

from distconv.arrangement import Arrangement
from distconv.errors import GridError, PlanError
from distconv.plan import Plan, check_product

StagePlan = Plan | Mapping[str, int] | None
"""How the ranks of a stage share its work: by a plan of its layers, all on one grid (parts by axis), or one rank."""


class Place(NamedTuple):
    """Where a rank is: its stage, which replica of it, and its rank in that replica's grid."""

    stage: int
    replica: int
    member: int


class StagePlacement:
    """The ranks of every stage. ``replicas`` counts and ``grids`` (extents by axis; None: one rank) per stage.

    Raises
    ------
    GridError
        If ``ranks`` is not the number of ranks that all stages need.
    """

    def __init__(
        self, ranks: int, replicas: Sequence[int], grids: Sequence[Mapping[str, int] | None] | None = None
    ) -> None:
        stages = len(replicas)
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
                f"start {needed} ranks or change stages, replicas or plans"
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


def boundary_grids(
    plans: Sequence[StagePlan], modules: Sequence[nn.Module], stages: int
) -> list[Mapping[str, int] | None]:
    """The grid on which tensors enter and leave each stage: of a plan that of the first layer that it decides.

    ``modules``: those of all stages; of several chunks stage i has every ``stages``-th one from the i-th on.

    Raises
    ------
    GridError
        If there are not as many plans as ``stages``.
    PlanError
        If a plan is none, does not fit its stage, or its layers have numbers of parts that no number of ranks suits.
    """
    if len(plans) != stages:
        raise GridError(f"pipeline: {len(plans)} plans for {stages} stages; give one (or None) for each")
    return [boundary_grid(f"stage {index}", plan, modules[index::stages]) for index, plan in enumerate(plans)]


def boundary_grid(where: str, plan: StagePlan, modules: Sequence[nn.Module]) -> Mapping[str, int] | None:
    """That of one stage; of a plan on as many ranks as all its layers need.

    Raises
    ------
    PlanError
        As :func:`boundary_grids`, saying ``where``.
    """
    if plan is None or isinstance(plan, Mapping):
        return plan
    if not isinstance(plan, Plan):
        raise PlanError(f"{where}: {plan!r} is neither a Plan, nor a grid such as {{'h': 2}}, nor None (one rank)")
    try:
        layers = [item for module in modules for item in plan.parts(module).items()]
        ranks = plan.ranks or math.lcm(*(math.prod(parts.values()) for _, parts in layers))
        for name, parts in layers:
            check_product(name, parts, ranks)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    first = layers[0][1]
    return {**first, "r": first.get("r", 1) * (ranks // math.prod(first.values()))}
