"""Process grids: a Cartesian view of the ranks with named axes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property

from mpi4py import MPI

from distconv.arrangement import AXES, Arrangement
from distconv.communication.agreement import agree, check_running
from distconv.errors import CommunicatorError, GridError
from distconv.process import watchdog


class ProcessGrid(Arrangement):
    """The ranks of ``comm`` arranged along named axes; axes left out have one part.

    Ranks vary fastest along ``c``, then ``w``, ``h``, ``d``, and slowest along ``n`` (``r`` outside it).
    Creating a grid is collective over ``comm``; the grid works on a duplicate of it.

    Raises
    ------
    GridError
        If an extent is not a positive integer, an axis is unknown, or the product is not ``comm.size``.
    MismatchError
        If the ranks ask for different grids.
    CommunicatorError
        If ``comm`` is null or freed, or MPI is not running.
    """

    def __init__(self, comm: MPI.Intracomm, **axes: int) -> None:
        check_running()
        if comm == MPI.COMM_NULL:
            raise CommunicatorError(
                "ProcessGrid was given MPI.COMM_NULL (a freed communicator, or one this rank is not in)"
            )
        agree(comm, "ProcessGrid", ", ".join(f"{k}={v!r}" for k, v in sorted(axes.items())))
        super().__init__(**axes)
        if self.size != comm.size:
            raise GridError(
                f"process grid {self.describe()} has {self.size} parts but the communicator has {comm.size} ranks; "
                f"start {self.size} ranks or choose extents whose product is {comm.size}"
            )
        self.world = comm.Dup()
        self.rank: int = comm.rank
        self.coords = self.coords_of(self.rank)
        self._comms: dict[tuple[str, ...], MPI.Intracomm] = {}
        self._factored: dict[tuple[int, int], ProcessGrid] = {}

    def comm(self, axes: Iterable[str] | str) -> MPI.Intracomm:
        """Communicator of the ranks that differ from this one only along ``axes``.

        Collective over the grid at its first use for these axes, cached afterwards. With no axis of more than one
        part it is a communicator of this rank alone.
        """
        key = self.split_axes((axes,) if isinstance(axes, str) and axes in AXES else axes)
        found = self._comms.get(key)
        if found is None:
            check_running()
            rest = {name: index for name, index in self.coords.items() if name not in key}
            with watchdog.waiting(lambda: f"making the communicator over {','.join(key)}"):
                found = self._comms[key] = MPI.Intracomm(self.world.Split(self.rank_of(rest), self.rank))
        return found

    @cached_property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """What makes two grids equal: their extents and the ranks they are over."""
        world = MPI.COMM_WORLD.group
        ranks = self.world.group.Translate_ranks(None, world)
        return tuple(self.shape[name] for name in AXES), hashlib.blake2b(repr(list(ranks)).encode()).digest()

    @cached_property
    def flat(self) -> ProcessGrid:
        """The same ranks in one row along ``n``. Collective at its first use."""
        return self if self.shape["n"] == self.size else ProcessGrid(self.world, n=self.size)

    def factored(self, first: int, second: int) -> ProcessGrid:
        """The same ranks with axis ``c`` cut into ``w`` = ``first`` by ``c`` = ``second`` and all else along ``r``.

        Index i along ``c`` of this grid is there at w = i // second, c = i % second. Collective at its first use.
        """
        found = self._factored.get((first, second))
        if found is None:
            rest = self.size // (first * second)
            found = self._factored[first, second] = ProcessGrid(self.world, r=rest, w=first, c=second)
        return found

    def same_as(self, other: ProcessGrid) -> bool:
        """Whether ``other`` arranges the same ranks in the same way."""
        return other is self or self.key == other.key

    def __repr__(self) -> str:
        return f"ProcessGrid({self.describe()}, {self.size} ranks)"
