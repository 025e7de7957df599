"""Process grids: a Cartesian view of the ranks with named axes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from mpi4py import MPI

from distconv.arrangement import AXES, Arrangement
from distconv.communication import agreement, exclusive
from distconv.communication.agreement import check_mpi_running, check_same_on_all_ranks
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import device_transport
from distconv.errors import CommunicatorError, GridError
from distconv.process import startup, watchdog

if TYPE_CHECKING:
    from typing_extensions import Self


class HasGrid(Protocol):
    """What belongs to a process grid: a distribution, a layout."""

    @property
    def grid(self) -> ProcessGrid:
        """The grid it belongs to."""


OnGrid = TypeVar("OnGrid", bound=HasGrid)

REMEMBERED = 4096
"""Results of a function that a grid keeps, until it forgets all of them."""

P = ParamSpec("P")
T = TypeVar("T")


class ProcessGrid(Arrangement):
    """The ranks of ``comm`` (default: all of the job) arranged along named axes; axes left out have one part.

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

    def __init__(self, comm: MPI.Intracomm | None = None, **axes: int) -> None:
        check_mpi_running()
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm == MPI.COMM_NULL:
            raise CommunicatorError(
                "ProcessGrid was given MPI.COMM_NULL (a freed communicator, or one this rank is not in)"
            )
        startup.start(comm)
        exclusive.fresh_reference_counts()
        check_same_on_all_ranks(comm, "ProcessGrid", ", ".join(f"{k}={v!r}" for k, v in sorted(axes.items())))
        super().__init__(**axes)
        if self.size != comm.size:
            raise GridError(
                f"process grid {self.describe()} has {self.size} parts but the communicator has {comm.size} ranks; "
                f"start {self.size} ranks or choose extents whose product is {comm.size}"
            )
        self._derived = CommunicatorRegistry.get(comm)
        self._derived.free_unused(comm)
        self.world = self._derived.duplicate(comm)
        device_transport.connect_process_groups(self.world)
        self.compared = self._derived.shared_duplicate(comm) if agreement.level == "all" else self.world
        """Where ranks compare what they call: if at all, one for all grids, since they may call on different ones."""
        self.rank: int = comm.rank
        self._cached: dict[object, Callable[..., Any]] = {}
        self._comms: dict[tuple[str, ...], MPI.Intracomm] = {}
        self._factored: dict[tuple[int, int], ProcessGrid] = {}
        self.scattered = 0
        """How many tensors have been scattered over it."""

    def comm(self, axes: Iterable[str] | str) -> MPI.Intracomm:
        """Communicator of the ranks that differ from this one only along ``axes``.

        Collective over the grid at its first use for these axes, cached afterwards. With no axis of more than one
        part it is a communicator of this rank alone.

        Raises
        ------
        CommunicatorError
            If the grid was freed, or MPI is not running.
        """
        key = self.split_axes((axes,) if isinstance(axes, str) and axes in AXES else axes)
        comm = self._comms.get(key)
        if comm is None:
            check_mpi_running()
            if not self.world:
                raise CommunicatorError(f"{self!r} was freed: make a new grid")
            rest = {name: index for name, index in self.coords.items() if name not in key}
            with watchdog.waiting(lambda: f"making the communicator over {','.join(key)}"):
                comm = self._comms[key] = self._derived.split(self.world, self.rank_of(rest), self.rank)
            device_transport.connect_process_groups(comm)
        return comm

    def reversed_comm(self, axis: str) -> MPI.Intracomm:
        """The communicator along ``axis`` with its ranks in the opposite order. Collective at its first use, cached."""
        key = (axis, "reversed")
        reversed_comm = self._comms.get(key)
        if reversed_comm is None:
            comm = self.comm((axis,))
            with watchdog.waiting(lambda: f"making the reversed communicator over {axis}"):
                reversed_comm = self._comms[key] = self._derived.split(comm, 0, -comm.rank)
        return reversed_comm

    @cached_property
    def coords(self) -> dict[str, int]:
        """Coordinate of this rank along every axis."""
        return self.coords_of(self.rank)

    @cached_property
    def key(self) -> Any:
        """What makes two grids equal: their extents and the ranks they are over."""
        ranks = self.world.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        return super().key, hashlib.blake2b(repr(list(ranks)).encode()).digest()

    @cached_property
    def flat(self) -> ProcessGrid:
        """The same ranks in one row along ``n``. Collective at its first use."""
        return self if self.shape["n"] == self.size else ProcessGrid(self.world, n=self.size)

    def factored(self, first: int, second: int) -> ProcessGrid:
        """The same ranks with axis ``c`` cut into ``w`` = ``first`` by ``c`` = ``second`` and all else along ``r``.

        Index i along ``c`` of this grid is there at w = i // second, c = i % second. Collective at its first use.
        """
        grid = self._factored.get((first, second))
        if grid is None:
            rest = self.size // (first * second)
            grid = self._factored[first, second] = ProcessGrid(self.world, r=rest, w=first, c=second)
        return grid

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def cached(self, function: Callable[..., T]) -> Callable[..., T]:
        """``function`` with a memory of its last results, kept at most as long as this grid is."""
        cached = self._cached.get(function)
        if cached is None:
            cached = self._cached[function] = _remembering(function)
        return cached

    def free(self) -> None:
        """Free the grid's communicators; tensors and models on it can communicate no more. Collective.

        What all ranks have dropped is freed when they next make a grid over the same ``comm``. What makes many grids
        over other communicators frees them, or uses each as a context manager: MPI has a few thousand.
        """
        self._cached.clear()
        for grid in (*self._factored.values(), self.__dict__.get("flat")):
            if grid not in (None, self):
                grid.free()
        self._factored.clear()
        for comm in (*self._comms.values(), self.world):
            self._derived.free(comm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After a failure other ranks may be elsewhere: freeing, which all do together, would wait for them.
        if kind is None:
            self.free()


def _remembering(function: Callable[..., T]) -> Callable[..., T]:
    """``function`` with a memory of its results that depends on nothing but the order of those it had not.

    ``function`` may ask all ranks, so they must remember alike; and one may look up what it has more often than others,
    which changes what ``lru_cache`` drops.
    """

    def work_out(*args: Any, **named: Any) -> T:
        if remembering.cache_info().currsize >= REMEMBERED:
            remembering.cache_clear()
        return function(*args, **named)

    remembering = lru_cache(maxsize=None)(work_out)
    return remembering


def cached_on_grid(function: Callable[Concatenate[OnGrid, P], T]) -> Callable[Concatenate[OnGrid, P], T]:
    """``function`` with a memory that is kept with the grid of the first argument: all of a grid's ranks forget alike.

    A cache of the process would keep every grid alive, and which entry it drops would depend on what a rank does on
    other grids, in which its peers here may have no part.
    """

    @wraps(function)
    def found(first: OnGrid, /, *more: P.args, **named: P.kwargs) -> T:
        return first.grid.cached(function)(first, *more, **named)

    return found
