"""Sources of image values for a loader: arrays in memory, and randomly shifted images.

Both classes implement :class:`distconv.data.source.SampleSource`, as files do. Loaders cannot tell them apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data.source import SampleSource
from distconv.distribution import Box, Interval

_SHIFTS = 2
"""Stream of random numbers. The loader uses streams 0 and 1."""


class Arrays:
    """Arrays in memory. Every rank has all values and returns the requested box."""

    readers = 1

    def __init__(self, path: Path, comm: MPI.Intracomm, **arrays: NDArray[Any]) -> None:
        self.path, self.comm, self._arrays = path, comm, arrays

    def close(self) -> None:
        """Do nothing: no file is open."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, samples first."""
        return self._arrays[name].shape

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of one sample, with a leading 1."""
        return (1, *self.shape(name)[1:])

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box``.

        Parameters
        ----------
        name : str
            Name of the array.
        box : Box
            Index range of each dimension.

        Returns
        -------
        numpy.ndarray
        """
        return self._arrays[name][tuple(slice(i.start, i.stop) for i in box)]

    def check_unchanged(self) -> None:
        """Do nothing: arrays in memory do not change."""

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Do nothing: memory has no chunks.

        Parameters
        ----------
        name : str
        block : tuple of int
        """


class ShiftedImages:
    """The first ``samples`` images of a source, each shifted by up to ``shift`` pixels along H and along W.

    The shift depends on seed, epoch and sample alone. Zeros fill the border. The result is a random crop of the image
    padded by ``shift`` zeros. Set ``epoch`` before the images of an epoch are read.

    Parameters
    ----------
    source : SampleSource
        The source; it is closed with this object.
    samples : int
        Number of images.
    shift : int
        Largest shift, in pixels.
    seed : int
        Seed of the shifts.
    """

    epoch = 0

    def __init__(self, source: SampleSource, samples: int, *, shift: int = 0, seed: int = 0) -> None:
        self.path, self.comm, self.readers = source.path, source.comm, source.readers
        self._source, self._samples, self._shift, self._seed = source, samples, shift, seed

    def close(self) -> None:
        """Close the source on this rank."""
        self._source.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a dataset, samples first."""
        return (self._samples, *self._source.shape(name)[1:])

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of the source's chunks."""
        return self._source.chunks(name)

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the source has changed. Collective."""
        self._source.check_unchanged()

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn on rank 0 if the source's chunks are larger than the ``block`` to be read.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : tuple of int
            Shape of the block to be read.
        """
        self._source.warn_of_large_chunks(name, block)

    def moves(self, sample: int) -> tuple[int, int]:
        """Return the numbers of rows and columns by which a sample is shifted in the current epoch."""
        drawn = np.random.default_rng((self._seed, _SHIFTS, self.epoch, sample))
        down, right = drawn.integers(-self._shift, self._shift + 1, 2)
        return int(down), int(right)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box`` of one image (1, C, H, W). Local; may be called from another thread.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Index range of each dimension.

        Returns
        -------
        numpy.ndarray
        """
        if not self._shift:
            return self._source.read(name, box)
        one, channels, *space = box
        there, here = [], []
        # Index i of the shifted image is index i - move of the stored one. Where that does not exist, zeros remain.
        for wanted, extent, move in zip(space, self.shape(name)[2:], self.moves(one.start), strict=True):
            image = Interval(0, extent).intersect(Interval(wanted.start - move, wanted.stop - move))
            there.append(image)
            here.append(slice(image.start + move - wanted.start, image.stop + move - wanted.start))
        values = self._source.read(name, (one, channels, *there))
        moved = np.zeros([i.extent for i in box], values.dtype)
        moved[:, :, here[0], here[1]] = values
        return moved
