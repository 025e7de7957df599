"""Variables on a grid as the channels of samples, read from the stores of their files.

A pickled copy opens the stores again, so that reading processes can read boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location
from distconv.data.formats.store import Slices, Store, describe_unknown_dataset
from distconv.errors import DataError


@dataclass(frozen=True)
class Channels:
    """Consecutive channels: one variable at one time, at some of its levels."""

    variable: str
    lag: int | None
    """Time after that of the sample, in stored steps; None for a variable without times."""
    levels: tuple[int, ...] | None
    """Indices of the levels; None for a variable without levels."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class GriddedChannels:
    """Datasets (N, C, grid): each sample consists of variables at one time or at several."""

    path: Location
    """Location of the files, for errors."""
    stores: Mapping[str, Store]
    """Store of each variable."""
    datasets: Mapping[str, Sequence[Channels]]
    bases: range
    """Stored step of each sample."""

    @property
    def libraries(self) -> list[str]:
        """Modules that the stores import; a reading process imports them before it forks its children."""
        stores = self.stores.values()
        return [each for store in stores for each in (type(store).__module__, *store.libraries)]

    def channels(self, name: str) -> Sequence[Channels]:
        """Return the channels of a dataset.

        Raises
        ------
        DataError
            If there is no such dataset.
        """
        if name not in self.datasets:
            raise DataError(describe_unknown_dataset(name, self.path, self.datasets))
        return self.datasets[name]

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of what :meth:`read` returns, which holds the values of all variables."""
        return np.result_type(*(self.stores[each.variable].stored[each.variable].dtype for each in self.channels(name)))

    def read(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in a box.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : tuple of slice
            Slices of samples, channels and the grid.

        Returns
        -------
        ndarray

        Raises
        ------
        DataError
            If they cannot be read.
        """
        samples, wanted, *where = box
        values = np.empty([each.stop - each.start for each in box], self.dtype(name))
        begin = 0
        for channels in self.channels(name):
            end = begin + len(channels.names)
            first, last = max(begin, wanted.start), min(end, wanted.stop)
            if first < last:
                into = values[:, first - wanted.start : last - wanted.start]
                for row, sample in enumerate(range(samples.start, samples.stop)):
                    self._read_channels(into[row], channels, sample, slice(first - begin, last - begin), tuple(where))
            begin = end
        return values

    def _read_channels(
        self, into: NDArray[Any], channels: Channels, sample: int, part: slice, where: tuple[slice, ...]
    ) -> None:
        """Read ``part`` of some channels of a sample."""
        name, store = channels.variable, self.stores[channels.variable]
        if channels.lag is None:
            into[0] = store.read(name, where)
            return
        step = self.bases[sample] + channels.lag
        when = slice(step, step + 1)
        if channels.levels is None:
            into[0] = store.read(name, (when, *where))[0]
            return
        row = 0
        for run in _runs(channels.levels[part]):
            into[row : row + len(run)] = store.read(name, (when, slice(run[0], run[-1] + 1), *where))[0]
            row += len(run)


def _runs(indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive indices."""
    run: list[int] = []
    for index in indices:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
