"""Placement: which ranks run which stage. Stage by stage, replica by replica, each on its own grid. No MPI."""

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
"""Distribution of a stage: a plan of its layers, one grid for all of them (parts by axis), or None for one rank."""


class StagePosition(NamedTuple):
    """Position of a rank: its stage, replica, and rank in that replica's grid."""

    stage: int
    replica: int
    member: int


class StagePlacement:
    """Ranks of every stage.

    Parameters
    ----------
    ranks : int
        Ranks of the pipeline.
    replicas : sequence of int
        Replicas of each stage.
    grids : sequence, optional
        Parts by axis for each stage; None for one rank.

    Raises
    ------
    GridError
        If the stages need another number of ranks.
    """

    def __init__(
        self, ranks: int, replicas: Sequence[int], grids: Sequence[Mapping[str, int] | None] | None = None
    ) -> None:
        stages = len(replicas)
        # Ranks are assigned stage by stage, replica by replica; ranks of one replica are consecutive.
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
    def positions(self) -> list[StagePosition]:
        """Position of every rank."""
        return [
            StagePosition(stage, replica, member)
            for stage, (count, grid) in enumerate(zip(self.replicas, self.grids, strict=True))
            for replica in range(count)
            for member in range(grid.size)
        ]

    def ranks(self, stage: int, microbatch: int) -> range:
        """Return the ranks of the replica of ``stage`` that has a micro-batch, in the order of its grid.

        Parameters
        ----------
        stage : int
            The stage.
        microbatch : int
            The micro-batch.

        Returns
        -------
        range
        """
        first = self._first[stage, microbatch % self.replicas[stage]]
        return range(first, first + self.grids[stage].size)

    @cached_property
    def _first(self) -> dict[tuple[int, int], int]:
        """First rank of every replica."""
        return {(place.stage, place.replica): rank for rank, place in enumerate(self.positions) if place.member == 0}


def boundary_grids(
    plans: Sequence[StagePlan], modules: Sequence[nn.Module], stages: int
) -> list[Mapping[str, int] | None]:
    """Return the grid on which tensors enter and leave each stage; for a plan, that of its first deciding layer.

    Parameters
    ----------
    plans : sequence
        Distribution of each stage.
    modules : sequence of Module
        Modules of all stages. With several chunks, stage i has every ``stages``-th module from the i-th on.
    stages : int
        Number of stages.

    Returns
    -------
    list of mapping or None
        Parts by axis; None for one rank.

    Raises
    ------
    GridError
        If there is another number of plans.
    PlanError
        If a plan is invalid, or does not fit its stage.
    """
    if len(plans) != stages:
        raise GridError(f"pipeline: {len(plans)} plans for {stages} stages; give one (or None) for each")
    return [boundary_grid(f"stage {index}", plan, modules[index::stages]) for index, plan in enumerate(plans)]


def boundary_grid(where: str, plan: StagePlan, modules: Sequence[nn.Module]) -> Mapping[str, int] | None:
    """Return the grid on which tensors enter and leave one stage.

    Parameters
    ----------
    where : str
        Stage, for the error message.
    plan : Plan, mapping or None
        A plan without a number of ranks uses the least common multiple of its layers' parts.
    modules : sequence of Module
        Modules of the stage.

    Returns
    -------
    mapping or None
        Parts by axis; None for one rank.

    Raises
    ------
    PlanError
        As in :func:`boundary_grids`.
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
    # The ranks that the first layer leaves over hold replicas (axis r).
    first = layers[0][1]
    return {**first, "r": first.get("r", 1) * (ranks // math.prod(first.values()))}
