"""Files of variables on a grid: their dimensions, coordinates and times, over several files along the times."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.address import parse_location
from distconv.data.coordinates import Coordinate, decode_times, join_times
from distconv.data.formats.hdf5_files import ConcatenatedFiles, FileMetadata, read_file_metadata
from distconv.data.formats.store import Store
from distconv.data.opening import AnyPath, detect_format, display_path, list_files
from distconv.errors import DataError

LARGEST_GAP = 1.5
"""Largest ratio of two intervals between times. Months differ by 1.11."""


class GriddedFiles:
    """Variables and coordinates of one store, or of several along the dimension of times.

    Collective: construct on every rank.

    Parameters
    ----------
    path : str, path-like, Url or sequence of these
        As in :func:`open_gridded`.
    variables : list of str
        Names of the variables.
    comm : MPI.Intracomm
        Ranks that read.
    time : str
        Name of the dimension of times.
    space : int
        Number of dimensions of the grid.

    Attributes
    ----------
    coords : dict of str to Coordinate
        Coordinates of the dimensions that have some.
    dims : dict of str to tuple of str
        Names of the dimensions of each variable.
    """

    def __init__(
        self, path: AnyPath | Sequence[AnyPath], variables: list[str], comm: MPI.Intracomm, time: str, space: int
    ) -> None:
        self.path, self.comm, self.time, self.space = parse_location(display_path(path)), comm, time, space
        files = try_on_all_ranks(comm, lambda: list_files(path), DataError)
        places = [parse_location(path)] if files is None else list(files)  # type: ignore[arg-type]
        kind = try_on_all_ranks(comm, lambda: detect_format(places[0]), DataError)
        self._stores: list[Store] = []

        def opened(names: list[str]) -> Store:
            self._stores.append(kind(places[0], names))
            return self._stores[-1]

        try:
            self._first = try_on_all_ranks(comm, lambda: opened(variables), DataError)
            self.dims = try_on_all_ranks(comm, lambda: {name: self._dims_of(name) for name in variables}, DataError)
            known = dict.fromkeys(name for dims in self.dims.values() for name in dims)
            self._coordinates = try_on_all_ranks(
                comm, lambda: opened([name for name in known if self._first.has(name)]), DataError
            )
            self.coords = try_on_all_ranks(
                comm,
                lambda: {name: self._coordinates.coordinate(name) for name in self._coordinates.names},
                DataError,
            )
            self._dynamic = self._first
            if len(places) > 1:
                self._concatenate(places, [name for name in variables if self.dims[name][0] == time])
            seen = ", ".join(f"{name} {self.store(name).stored[name]}" for name in variables)
            check_same_on_all_ranks(comm, f"{self.path} as each rank sees it", seen)
        except BaseException:
            self.close()
            raise

    def _dims_of(self, name: str) -> tuple[str, ...]:
        dims = self._first.dims(name)
        if dims is None:
            raise DataError(
                f"{self._first.path}: variable {name!r} has no names of dimensions, as xarray and netCDF write them. "
                "Use open_source, where the first dimension counts samples."
            )
        grid = dims[1:] if dims[0] == self.time else dims
        if self.time in grid or not self.space <= len(grid) <= self.space + (dims[0] == self.time):
            raise DataError(
                f"{self._first.path}: variable {name!r} has the dimensions {dims}, but must have ({self.time}, "
                f"[levels,] grid) or (grid), with a grid of {self.space} dimensions. Name the dimension of times by "
                "time=, and the number of the grid's by space=, or transpose the variable."
            )
        return dims

    def _concatenate(self, places: list[Any], dynamic: list[str]) -> None:
        """Open the variables of all files along their times. Each rank reads the metadata of every P-th file."""
        if not dynamic:
            raise DataError(f"{self.path}: several files, but no variable has the dimension {self.time!r}")
        has_times = self.time in self.coords
        names = [*dynamic, *([self.time] if has_times else [])]
        comm, grid = self.comm, [name for name in self.coords if name != self.time]

        def head(place: Any) -> tuple[FileMetadata, bytes, Coordinate | None]:
            kind = detect_format(place)
            metadata = read_file_metadata(place, names, one_each=False, kind=kind)
            store = kind(place, [*grid, *([self.time] if has_times else [])])
            try:
                read = {each: store.coordinate(each) for each in store.names}
            finally:
                store.close()
            digest = hashlib.blake2b(b"".join(read[each].values.tobytes() for each in grid)).digest()
            return metadata, digest, read.get(self.time)

        mine = try_on_all_ranks(comm, lambda: [head(each) for each in places[comm.rank :: comm.size]], DataError)
        of_ranks = comm.allgather(mine)
        heads = [of_ranks[index % comm.size][index // comm.size] for index in range(len(places))]
        other = next((h[0].path for h in heads if h[1] != heads[0][1]), None)
        if other is not None:
            raise DataError(f"{other}: its coordinates differ from those of {places[0]}. Open them separately.")

        def concatenated() -> Store:
            self._stores.append(ConcatenatedFiles(self.path, names, [h[0] for h in heads], one_each=False))
            return self._stores[-1]

        self._dynamic = try_on_all_ranks(comm, concatenated, DataError)
        if has_times:
            all_times = [h[2] for h in heads if h[2] is not None]
            self.coords[self.time] = try_on_all_ranks(comm, lambda: join_times(self.path, all_times), DataError)

    def store(self, name: str) -> Store:
        """Return the store that has all times of a variable."""
        return self._dynamic if self.dims[name][0] == self.time else self._first

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a variable, over all files."""
        return self.store(name).stored[name].shape

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable's chunks."""
        return self.store(name).stored[name].chunks

    def attributes(self, name: str) -> Mapping[str, Any]:
        """Return the attributes of a variable."""
        return self._first.attributes(name)

    @property
    def states(self) -> dict[Any, Any]:
        """Identity of each file when it was opened."""
        return {path: state for store in self._stores for path, state in store.states.items()}

    def close(self) -> None:
        """Close all files."""
        for store in self._stores:
            store.close()


# -- times -----------------------------------------------------------------------------------------------------------


def find_period(path: object, times: Coordinate | None, name: str, first: str, last: str) -> tuple[int, int]:
    """Return the range of stored steps in a period, both ends included.

    Parameters
    ----------
    path : object
        Location of the files, for errors.
    times : Coordinate or None
        Stored times, if there are any.
    name : str
        Name of the dimension of times.
    first, last : str
        ISO dates.

    Returns
    -------
    (int, int)
        First step, and the step after the last one.

    Raises
    ------
    DataError
        If there are no times, or they cannot be decoded or compared.
    """
    if times is None:
        raise DataError(f"{path}: dimension {name!r} has no coordinate. Select times by a slice of stored steps.")
    index = decode_times(path, times)
    try:
        found = index.slice_indexer(first, last)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: times={first, last!r}: {error}") from error
    return found.start or 0, len(index) if found.stop is None else found.stop


def check_gaps(path: object, times: Coordinate | None, first: int, last: int) -> None:
    """Check that times increase in about equal steps, so that a lag is the same for all samples.

    Parameters
    ----------
    path : object
        Location of the files, for errors.
    times : Coordinate or None
        Stored times, if there are any.
    first, last : int
        Range of stored steps to check.

    Raises
    ------
    DataError
        If they do not increase, or have a gap.
    """
    if times is None or last - first < 2:
        return
    steps = np.diff(times.values[first:last].astype(np.float64))
    if not (steps > 0).all():
        at = first + int(np.flatnonzero(~(steps > 0))[0])
        raise DataError(f"{path}: times do not increase from step {at} to {at + 1}. Sort them, or the list of files.")
    if steps.max() > LARGEST_GAP * steps.min():
        at = first + int(steps.argmax())
        raise DataError(
            f"{path}: times have a gap of {steps.max():g} between the steps {at} and {at + 1}, where others are "
            f"{steps.min():g} apart, so a lag would not be the same for all samples. Select times without gaps."
        )
