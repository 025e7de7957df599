"""Position of a rank in a pipeline, and its communicators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mpi4py import MPI

from distconv.grid import ProcessGrid

from .p2p import P2P
from .placement import StagePlacement, StagePosition


@dataclass(frozen=True)
class Topology:
    """Position and communicators of a rank.

    Attributes
    ----------
    position : StagePosition
        Stage, replica and rank in the replica's grid.
    stage_comm : MPI.Intracomm
        Ranks of this replica of the stage.
    replica_comm : MPI.Intracomm
        Corresponding ranks of all replicas of the stage: those with the same block. Its ranks are numbers of replicas.
    grid : ProcessGrid or None
        Grid on which tensors enter and leave the stage; None for one rank.
    p2p : P2P
        Messages to neighbouring stages.
    """

    position: StagePosition
    stage_comm: MPI.Intracomm
    replica_comm: MPI.Intracomm
    grid: ProcessGrid | None
    p2p: P2P

    @staticmethod
    def create(comm: MPI.Intracomm, placement: StagePlacement, device: torch.device) -> Topology:
        """Return the topology of this rank. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
            All ranks of the pipeline.
        placement : StagePlacement
        device : device
            Device of the tensors in messages.

        Returns
        -------
        Topology
        """
        positions = placement.positions
        own = positions[comm.rank]
        # Both splits, and the duplicates in P2P, are collective over all ranks. Ranks with the same color form a
        # communicator; the first rank of it serves as the color.
        stage_comm = MPI.Intracomm(comm.Split(positions.index(own._replace(member=0)), comm.rank))
        replica_comm = MPI.Intracomm(comm.Split(positions.index(own._replace(replica=0)), comm.rank))
        arrangement = placement.grids[own.stage]
        grid = ProcessGrid(stage_comm, **arrangement.shape) if arrangement.size > 1 else None
        return Topology(own, stage_comm, replica_comm, grid, P2P(comm, placement, own, grid, device))

    def close(self) -> None:
        """Wait until all messages are sent, and free the communicators. Collective: call on every rank.

        The grid stays, because its model needs it.
        """
        self.p2p.close()
        self.stage_comm.Free()
        self.replica_comm.Free()
