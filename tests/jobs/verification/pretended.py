"""A communicator of this process that says it has several ranks, for code whose communication is replaced."""

from __future__ import annotations

from mpi4py import MPI


class _TwoRanks(MPI.Intracomm):
    rank, size = 0, 2  # type: ignore[assignment]


def two_ranks() -> MPI.Intracomm:
    """The first of two ranks, the other of which takes part in nothing."""
    return _TwoRanks(MPI.COMM_SELF)
