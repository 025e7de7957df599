"""Samples of climate and flow data: variables on a grid as channels, at one time or at several.

A variable has the dimensions (time, lat, lon) or (time, level, lat, lon), or (lat, lon) if it is the same at all times.
The names of the dimensions may be others. A sample consists of the variables at one time; pairs for forecasts have
further datasets, whose times come later::

    x    t2m, z at each level, land-sea mask        at time t
    y    t2m, z at each level                       at t + 1, t + 2, t + 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.coordinates import Coordinate
from distconv.data.formats.gridded_channels import Channels, GriddedChannels
from distconv.data.gridded_files import GriddedFiles, check_gaps, find_period
from distconv.data.hdf5 import check_files_unchanged, warn_of_chunks
from distconv.data.opening import AnyPath, display_path
from distconv.data.reading_processes import ReadByProcesses
from distconv.distribution import Box
from distconv.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self


def open_gridded(
    path: AnyPath | Sequence[AnyPath],
    datasets: Mapping[str, Sequence[str]],
    comm: MPI.Intracomm | None = None,
    *,
    lag: Mapping[str, int | Sequence[int]] | None = None,
    levels: Mapping[str, Sequence[float]] | None = None,
    times: slice | tuple[str, str] | None = None,
    every: int = 1,
    time: str = "time",
    space: int = 2,
    readers: int = 1,
) -> GriddedSource:
    """Open variables on a grid as a source for :class:`Loader`: each dataset has its variables as channels.

    Values are decoded as xarray decodes them; missing ones are NaN (see ``Field.fill``). Each rank reads the chunks
    that its boxes touch. Collective: call on every rank.

    Parameters
    ----------
    path : str, path-like, Url or sequence of these
        A zarr group, a netCDF file, or several of either in the order of their times: a list, a pattern
        (``era5/*.nc``) or a folder. Variables without times, and coordinates, are read from the first one.
    datasets : mapping of str to sequence of str
        Variables of each dataset. A variable with levels has a channel for each level.
    comm : MPI.Intracomm, optional
        Ranks that read. Default: all ranks of the job.
    lag : mapping of str to int or sequence of int, optional
        Time of a dataset after that of the sample, in stored steps, ``{"y": 1}``. With several, ``{"y": (1, 2, 3)}``,
        the channels of the first time come first. Default: 0.
    levels : mapping of str to sequence of float, optional
        Values along a dimension of levels, ``{"level": (500, 850)}``. Default: all.
    times : slice or tuple of str, optional
        Stored steps, or the first and the last time as ISO dates, ``("2001-01", "2001-12-31")``. No dataset has other
        times. Default: all.
    every : int
        Stored steps between two samples.
    time : str
        Name of the dimension of times.
    space : int
        Number of dimensions of the grid, which are the last ones.
    readers : int
        Processes that read at a time on each rank. With 1 this process reads, in a thread.

    Returns
    -------
    GriddedSource
        The open variables. The caller closes it.

    Raises
    ------
    DataError
        On all ranks, if a variable is missing or has other dimensions, variables or files have different grids, times
        do not increase or have gaps, or no sample is left.
    MismatchError
        If ranks pass different arguments, or see different files.

    Examples
    --------
    >>> source = open_gridded("era5.zarr", {"x": ["t2m", "z"], "y": ["t2m"]}, lag={"y": 1})   # doctest: +SKIP
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    options = f"{lag=}, {levels=}, {times=}, {every=}, {time=}, {space=}, {readers=}"
    check_same_on_all_ranks(comm, "open_gridded", f"{display_path(path)}, {dict(datasets)}, {options}")
    lags = {name: _steps(name, (lag or {}).get(name, 0)) for name in datasets}
    unknown = sorted(set(lag or {}) - set(datasets))
    if not datasets or unknown or not all(datasets.values()) or every < 1 or space < 1:
        what = f"lag names {unknown[0]!r}, which is no dataset" if unknown else "no variables are named"
        what = f"every={every} and space={space} must be at least 1" if every < 1 or space < 1 else what
        raise DataError(
            f"open_gridded: {display_path(path)}: {what}. The datasets are {', '.join(datasets) or 'none'}."
        )
    variables = list(dict.fromkeys(each for names in datasets.values() for each in names))
    grid = GriddedFiles(path, variables, comm, time, space)
    try:
        source = try_on_all_ranks(
            comm,
            lambda: GriddedSource(grid, datasets, lags=lags, levels=levels or {}, times=times, every=every),
            DataError,
        )
        if readers != 1:
            source._read_by_processes(readers)
        return source
    except BaseException:
        grid.close()
        raise


def latitude_weights(latitudes: Any) -> torch.Tensor:
    """Return the relative areas of rows of a latitude-longitude grid, with mean 1.

    Parameters
    ----------
    latitudes : array of float
        Latitudes in degrees, of shape (H,).

    Returns
    -------
    Tensor
        Their cosines divided by the mean cosine, of shape (H, 1), in float64. It multiplies a tensor (N, C, H, W).

    Raises
    ------
    DataError
        If a latitude is not between -90 and 90 degrees.
    """
    degrees = np.asarray(latitudes, np.float64).reshape(-1)
    if not degrees.size or not (np.abs(degrees) <= 90 + 1e-6).all():
        raise DataError(f"latitude_weights: latitudes must be -90 to 90 degrees, not {degrees}")
    cosines = np.cos(np.deg2rad(degrees))
    return torch.from_numpy(cosines / cosines.mean()).reshape(-1, 1)


class GriddedSource:
    """Variables on a grid as datasets (N, C, H, W); a source for :class:`Loader`. :func:`open_gridded` returns one.

    Attributes
    ----------
    coords : dict of str to Coordinate
        Coordinates of the variables' dimensions, as stored, those of times included.
    """

    readers = 1
    """Number of boxes that may be read at a time."""

    def __init__(
        self,
        files: Any,
        datasets: Mapping[str, Sequence[str]],
        *,
        lags: Mapping[str, tuple[int, ...]],
        levels: Mapping[str, Sequence[float]],
        times: slice | tuple[str, str] | None,
        every: int,
    ) -> None:
        """Select times and levels of open files; the arguments are those of :func:`open_gridded`."""
        self._files: GriddedFiles = files
        self.comm, self.path, self.coords = files.comm, files.path, files.coords
        self._grid = self._check_grid()
        self._levels = {name: self._level_indices(name, values) for name, values in levels.items()}
        channels = {
            name: [each for lag in lags[name] for variable in names for each in self._channels_of(variable, lag)]
            for name, names in datasets.items()
        }
        bases = self._select_times(times, every, [lag for steps in lags.values() for lag in steps])
        self.store = GriddedChannels(self.path, {name: files.store(name) for name in files.dims}, channels, bases)
        self._processes: ReadByProcesses | None = None

    def _check_grid(self) -> tuple[int, ...]:
        """Return the extents of the grid, which all variables have."""
        files = self._files
        grids = {
            name: dict(zip(dims[-files.space :], files.shape(name)[-files.space :], strict=True))
            for name, dims in files.dims.items()
        }
        first, grid = next(iter(grids.items()))
        for name, other in grids.items():
            if list(other.items()) != list(grid.items()):
                raise DataError(
                    f"{self.path}: variable {name!r} is on the grid {other}, but {first!r} on {grid}. Open variables "
                    "of different grids separately."
                )
        return tuple(grid.values())

    def _level_indices(self, dimension: str, wanted: Sequence[float]) -> tuple[int, ...]:
        if not any(dimension in dims[1 : -self._files.space] for dims in self._files.dims.values()):
            raise DataError(f"{self.path}: levels={dimension!r} is not a dimension of levels of any variable")
        if dimension not in self.coords:
            raise DataError(f"{self.path}: dimension {dimension!r} has no coordinate, from which levels are selected")
        stored = self.coords[dimension].values
        indices = [np.flatnonzero(np.isclose(stored, value, rtol=1e-6, atol=0)) for value in wanted]
        missing = [value for value, found in zip(wanted, indices, strict=True) if len(found) != 1]
        if missing:
            raise DataError(f"{self.path}: {dimension!r} has no level {missing[0]}; its levels are {stored}")
        return tuple(int(found[0]) for found in indices)

    def _channels_of(self, variable: str, lag: int) -> Iterator[Channels]:
        files = self._files
        dims, shape = files.dims[variable], files.shape(variable)
        has_times = dims[0] == files.time
        after = f" at {lag:+}" if lag and has_times else ""
        if len(dims) == has_times + files.space:
            yield Channels(variable, lag if has_times else None, None, (f"{variable}{after}",))
            return
        indices = self._levels.get(dims[1], tuple(range(shape[1])))
        stored = self.coords[dims[1]].values if dims[1] in self.coords else np.arange(shape[1])
        names = tuple(f"{variable} {dims[1]}={stored[index]:g}{after}" for index in indices)
        yield Channels(variable, lag, indices, names)

    def _select_times(self, times: slice | tuple[str, str] | None, every: int, lags: Sequence[int]) -> range:
        """Return the stored step of each sample."""
        files = self._files
        counts = {name: files.shape(name)[0] for name, dims in files.dims.items() if dims[0] == files.time}
        if not counts or len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} in {name!r}" for name, count in counts.items()) or "no variable has times"
            raise DataError(f"{self.path}: the numbers of times ({files.time!r}) differ: {listed}")
        (count,) = set(counts.values())
        if isinstance(times, slice) or times is None:
            first, last, step = (times or slice(None)).indices(count)
            if step != 1:
                raise DataError(f"open_gridded: times={times} has a step. Pass every={step}.")
        else:
            first, last = find_period(self.path, self.coords.get(files.time), files.time, *times)
        if any(lags):
            check_gaps(self.path, self.coords.get(files.time), first, last)
        # All times of a sample are inside, so that two periods share no values.
        bases = range(first - min(0, *lags, 0), last - max(0, *lags, 0), every)
        if not bases:
            raise DataError(
                f"{self.path}: no sample is left of {count} times with times={times} and lags {sorted(set(lags))}"
            )
        return bases

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files on this rank, and end its reading processes."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()  # which closes this source
        self._files.close()

    def _read_by_processes(self, readers: int) -> None:
        """Read by several processes on each rank from now on. Collective."""
        self._processes = ReadByProcesses(self, readers)
        self.readers = readers

    def channel_names(self, name: str) -> list[str]:
        """Return variable, level and lag of each channel of a dataset, such as ``z level=500 at +1``."""
        return [each for channels in self.store.channels(name) for each in channels.names]

    def sample_times(self, lag: int = 0) -> Coordinate | None:
        """Return the time of each sample, with the stored units; None if times have no coordinate.

        Parameters
        ----------
        lag : int
            Stored steps to add.

        Returns
        -------
        Coordinate or None

        Raises
        ------
        DataError
            If ``lag`` leads out of the stored times.
        """
        stored = self.coords.get(self._files.time)
        if stored is None:
            return None
        steps = np.asarray(self.store.bases) + lag
        if steps[0] < 0 or steps[-1] >= len(stored.values):
            raise DataError(
                f"{self.path}: sample_times({lag}): steps {steps[0]} to {steps[-1]} of {len(stored.values)} times"
            )
        return Coordinate(stored.dims, stored.values[steps], stored.attributes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset: samples, channels, grid."""
        return (len(self.store.bases), len(self.channel_names(name)), *self._grid)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of what :meth:`read` returns, which holds the values of all variables."""
        return self.store.dtype(name)

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of the blocks in which the first variable is stored."""
        return (1, 1, *self._files.chunks(self.store.channels(name)[0].variable)[-len(self._grid) :])

    def variable_attributes(self, variable: str) -> Mapping[str, Any]:
        """Return the attributes of a variable, such as its units, without those by which it was decoded."""
        return self._files.attributes(variable)

    def column(self, name: str) -> list[object] | None:
        """Return the time of each sample if ``name`` is the dimension of times; None otherwise."""
        times = self.sample_times() if name == self._files.time else None
        return None if times is None else list(times.values.tolist())

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box``. Not collective; may run in another thread.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Global indices: samples, channels, grid.

        Returns
        -------
        ndarray

        Raises
        ------
        DataError
            On this rank, if they cannot be read.
        """
        if self._processes is not None:
            return self._processes.read(name, box)
        return self.store.read(name, tuple(slice(each.start, each.stop) for each in box))

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if a file was replaced or changed since it was opened. Collective."""
        check_files_unchanged(self.comm, self._files.states)

    def warn_of_large_chunks(self, name: str, block: Sequence[int]) -> None:
        """Warn on rank 0 if chunks are larger than the ``block`` (without the sample dimension) that a rank reads.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : sequence of int
            Shape that a rank reads, without the sample dimension.
        """
        warn_of_chunks(self, name, block)


def _steps(name: str, lag: int | Sequence[int]) -> tuple[int, ...]:
    steps = (lag,) if isinstance(lag, int) else tuple(lag)
    if not steps or not all(isinstance(step, int) and not isinstance(step, bool) for step in steps):
        raise DataError(f"open_gridded: lag of {name!r} is {lag!r}. Give a number of stored steps, or several.")
    return steps
