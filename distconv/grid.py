"""Process grids: a Cartesian view of the ranks of a communicator, with named axes.

A grid owns all communicators of the tensors on it, and the caches whose lifetime is bound to it. Making one is
collective, and so is whatever makes a communicator or fills a cache for the first time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from mpi4py import MPI

from distconv.arrangement import AXES, SLOWEST_FIRST, Arrangement
from distconv.communication import agreement, exclusive
from distconv.communication.agreement import check_mpi_running, check_same_on_all_ranks
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import device_transport
from distconv.errors import CommunicatorError, GridError
from distconv.process import startup, watchdog

if TYPE_CHECKING:
    from typing_extensions import Self


class HasGrid(Protocol):
    """An object that belongs to a process grid, such as a distribution."""

    @property
    def grid(self) -> ProcessGrid:
        """The grid."""


OnGrid = TypeVar("OnGrid", bound=HasGrid)

CACHE_LIMIT = 4096
"""Maximum number of results of one function that a grid caches. When the cache is full, it is emptied."""

P = ParamSpec("P")
T = TypeVar("T")


class ProcessGrid(Arrangement):
    """The ranks of a communicator, arranged along named axes.

    Axes are ``n`` (samples), ``c`` (channels), ``d``, ``h``, ``w`` (space) and ``r`` (replicas). Ranks vary fastest
    along ``c``, then ``w``, ``h``, ``d``, ``n``, and slowest along ``r``. The grid works on a duplicate of the
    communicator. It is a context manager that frees its communicators at the end of the block.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks (default: ``MPI.COMM_WORLD``).
    **axes : int
        Number of parts along each axis; an axis that is left out has one part. The product must be ``comm.size``.

    Attributes
    ----------
    world : MPI.Intracomm
        Communicator of all ranks of the grid.
    rank : int
        This rank in ``world``.
    shape : dict of str to int
        Number of parts along every axis.
    size : int
        Number of ranks.

    Raises
    ------
    GridError
        If a number of parts is not a positive integer, an axis is unknown, or the product is not ``comm.size``.
    MismatchError
        If ranks pass different axes.
    CommunicatorError
        If ``comm`` is null or freed, or MPI is not running.

    Examples
    --------
    >>> grid = dc.ProcessGrid(n=2, h=2)   # on 4 ranks           # doctest: +SKIP
    """

    def __init__(self, comm: MPI.Intracomm | None = None, **axes: int) -> None:
        check_mpi_running()
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm == MPI.COMM_NULL:
            raise CommunicatorError(
                "ProcessGrid was given MPI.COMM_NULL (a freed communicator, or one this rank is not in)"
            )
        startup.start(comm)
        # Runs a small backward pass, which must not happen inside a user's backward pass (see its docstring).
        exclusive.fresh_reference_counts()
        # Compared before the axes are checked, which may raise on one rank alone: the others would wait for it below.
        check_same_on_all_ranks(comm, "ProcessGrid", ", ".join(f"{k}={v!r}" for k, v in sorted(axes.items())))
        super().__init__(**axes)
        if self.size != comm.size:
            raise GridError(
                f"process grid {self.describe()} has {self.size} parts but the communicator has {comm.size} ranks; "
                f"start {self.size} ranks or choose numbers of parts whose product is {comm.size}"
            )
        self._derived = CommunicatorRegistry.get(comm)
        """Registry of all communicators that were derived from ``comm``, also by other grids."""
        # Collective: the only point at which communicators of dropped grids can be freed, since garbage collection runs
        # at different times on each rank.
        self._derived.free_unused(comm)
        self.world = self._derived.duplicate(comm)
        device_transport.connect_process_groups(self.world)
        self.comparison_comm = self._derived.shared_duplicate(comm) if agreement.level == "all" else self.world
        """Communicator over which ranks compare their calls. With ``DISTCONV_CHECK=all`` all grids of the same ranks
        share it, so that ranks that call operators on different grids find the difference."""
        self.rank: int = comm.rank
        self._cached: dict[object, Callable[..., Any]] = {}
        self._comms: dict[tuple[str, ...], MPI.Intracomm] = {}
        self._factored: dict[tuple[int, int, tuple[str, ...]], ProcessGrid] = {}
        self.scatter_count = 0
        """Number of tensors that were scattered over this grid, the same on all ranks: it selects those to compare."""

    def comm(self, axes: Iterable[str] | str) -> MPI.Intracomm:
        """Return the communicator of the ranks that differ from this rank only along some axes.

        Collective at its first use for these axes; cached afterwards.

        Parameters
        ----------
        axes : str or iterable of str
            The axes. Axes of one part are ignored.

        Returns
        -------
        MPI.Intracomm
            The communicator, with ranks in the order of the grid. Without an axis of more than one part it has this
            rank only.

        Raises
        ------
        CommunicatorError
            If the grid was freed, or MPI is not running.
        """
        key = self.split_axes((axes,) if isinstance(axes, str) and axes in AXES else axes)
        comm = self._comms.get(key)
        if comm is None:
            check_mpi_running()
            if not self.world:  # MPI handles are false once freed
                raise CommunicatorError(f"{self!r} was freed: make a new grid")
            # The color is the rank at this rank's coordinates along the other axes, and 0 along ``key``: the ranks with
            # the same color differ only along ``key``. All ranks of the grid take part, also in other colors.
            rest = {name: index for name, index in self.coords.items() if name not in key}
            with watchdog.waiting(lambda: f"making the communicator over {','.join(key)}"):
                # Ordered by rank, as in the grid: the order in which MPI adds follows from it.
                comm = self._comms[key] = self._derived.split(self.world, self.rank_of(rest), self.rank)
            device_transport.connect_process_groups(comm)
        return comm

    def reversed_comm(self, axis: str) -> MPI.Intracomm:
        """Return the communicator along ``axis`` with its ranks in reverse order. Collective at its first use.

        Parameters
        ----------
        axis : str
            Letter of a grid axis.

        Returns
        -------
        MPI.Intracomm
        """
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
        """Value that is equal for grids of the same shape over the same ranks of ``MPI.COMM_WORLD``."""
        ranks = self.world.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        return super().key, hashlib.blake2b(repr(list(ranks)).encode()).digest()

    @cached_property
    def flat(self) -> ProcessGrid:
        """Grid of the same ranks along the axis ``n`` only. Collective at its first use."""
        return self if self.shape["n"] == self.size else ProcessGrid(self.world, n=self.size)

    def factored(self, first: int, second: int, merged: tuple[str, ...] = ()) -> ProcessGrid:
        """Return a grid of the same ranks for weights: axis ``c`` is factored into two axes, and others are merged.

        Index i along ``c`` of this grid has the coordinates w = i // second and c = i % second in the new grid. The
        ranks along ``merged`` are along ``n`` in the new grid. Axes that vary faster become ``d``, all others ``r``.
        Collective at its first use; cached.

        Parameters
        ----------
        first, second : int
            Number of parts along the axes ``w`` and ``c`` of the new grid. Their product is this grid's number of parts
            along ``c``, or 1.
        merged : tuple of str
            Axes without ``c``. No other axis of several parts lies between them in the order of the ranks.

        Returns
        -------
        ProcessGrid
        """
        key = (first, second, merged)
        grid = self._factored.get(key)
        if grid is None:
            parts = math.prod(self.shape[axis] for axis in merged)
            last = SLOWEST_FIRST.index(merged[-1]) + 1 if merged else len(SLOWEST_FIRST)
            faster = max(1, math.prod(self.shape[axis] for axis in SLOWEST_FIRST[last:]) // (first * second))
            slower = self.size // (parts * faster * first * second)
            grid = ProcessGrid(self.world, r=slower, n=parts, d=faster, w=first, c=second)
            self._factored[key] = grid
        return grid

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def cached(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function`` with a cache of its results that lives at most as long as this grid.

        Parameters
        ----------
        function : callable
            Function of hashable arguments, such as a plan of messages.

        Returns
        -------
        callable
        """
        cached = self._cached.get(function)
        if cached is None:
            cached = self._cached[function] = _memoize(function)
        return cached

    def free(self) -> None:
        """Free the communicators of the grid, so that tensors and models on it cannot communicate any more.

        Collective: call on every rank. Grids that all ranks have dropped are freed when the ranks next make a grid over
        the same communicator. A program that makes many grids over different communicators must free them, or use them
        as context managers: MPI implementations have only a few thousand communicators.
        """
        # Cached plans refer to the communicators.
        self._cached.clear()
        for grid in (*self._factored.values(), self.__dict__.get("flat")):
            if grid not in (None, self):
                grid.free()
        self._factored.clear()
        # In the order in which they were made, the same on all ranks, since freeing is collective.
        for comm in (*self._comms.values(), self.world):
            self._derived.free(comm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # Freeing is collective. After a failure on this rank the other ranks may be in another operation, and freeing
        # would wait for them.
        if kind is None:
            self.free()


def _memoize(function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` with a cache whose content depends only on the sequence of cache misses.

    ``function`` may be collective, so all ranks must miss at the same calls. With ``lru_cache(maxsize=n)`` they might
    not: a rank that looks up a cached value more often than the others evicts other values.
    """

    def compute(*args: Any, **named: Any) -> T:
        if memoized.cache_info().currsize >= CACHE_LIMIT:
            memoized.cache_clear()
        return function(*args, **named)

    memoized = lru_cache(maxsize=None)(compute)
    return memoized


def cached_on_grid(function: Callable[Concatenate[OnGrid, P], T]) -> Callable[Concatenate[OnGrid, P], T]:
    """Cache the results of a function with the grid of its first argument.

    All ranks of the grid hit and miss at the same calls, so ``function`` may be collective. A cache of the process
    would keep every grid alive. Its evictions would also depend on calls for other grids, which other ranks may not be
    part of.

    Parameters
    ----------
    function : callable
        Its first argument has an attribute ``grid``; all arguments are hashable.

    Returns
    -------
    callable
        The function with a cache.
    """

    @wraps(function)
    def look_up(first: OnGrid, /, *more: P.args, **named: P.kwargs) -> T:
        return first.grid.cached(function)(first, *more, **named)

    return look_up
