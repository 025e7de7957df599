"""Where a rank sits in a pipeline, and the communicators that go with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mpi4py import MPI

from distconv.grid import ProcessGrid

from .p2p import P2P
from .placement import Place, StagePlacement


@dataclass(frozen=True)
class Topology:
    """``group``: the ranks of one replica; over ``grid`` (None: one rank) tensors enter and leave the stage.

    ``twins``: the ranks with the same part of the stage in all of its replicas.
    """

    place: Place
    group: MPI.Intracomm
    twins: MPI.Intracomm
    grid: ProcessGrid | None
    p2p: P2P

    @staticmethod
    def of(comm: MPI.Intracomm, placement: StagePlacement, device: torch.device) -> Topology:
        """That of this rank, whose messages are for tensors on ``device``. Collective over ``comm``."""
        places = placement.places
        place = places[comm.rank]
        group = MPI.Intracomm(comm.Split(places.index(place._replace(member=0)), comm.rank))
        twins = MPI.Intracomm(comm.Split(places.index(place._replace(replica=0)), comm.rank))
        shape = placement.grids[place.stage]
        grid = ProcessGrid(group, **shape.shape) if shape.size > 1 else None
        return Topology(place, group, twins, grid, P2P(comm, placement, place, grid, device))

    def close(self) -> None:
        """Wait until everything has been sent, and free the communicators; the grid stays, for its model."""
        self.p2p.close()
        self.group.Free()
        self.twins.Free()
