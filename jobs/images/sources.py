"""Where a loader's images come from: arrays in memory beside files, and the part of either that training takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data.source import SampleSource
from distconv.distribution import Box, Interval

_SHIFTS = 2
"""Stream of random numbers; those of the loader are 0 and 1."""


class Arrays:
    """Arrays in memory: every rank has all of them, and cuts out what it needs."""

    readers = 1

    def __init__(self, path: Path, comm: MPI.Intracomm, **arrays: NDArray[Any]) -> None:
        self.path, self.comm, self._arrays = path, comm, arrays

    def close(self) -> None:
        """Nothing is open."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, samples first."""
        return self._arrays[name].shape

    def chunks(self, name: str) -> tuple[int, ...]:
        """A sample at a time."""
        return (1, *self.shape(name)[1:])

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values in ``box``."""
        return self._arrays[name][tuple(slice(i.start, i.stop) for i in box)]

    def check_unchanged(self) -> None:
        """They are."""

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Memory has no chunks."""


class ShiftedImages:
    """The first ``samples`` images of a source, each moved by up to ``shift`` pixels along H and along W.

    How far an image moves follows from seed, epoch and sample; zeros come in at the border. It is what a random crop of
    the image makes that was padded by ``shift`` zeros. Set ``epoch`` before the images of an epoch are read.
    """

    epoch = 0

    def __init__(self, source: SampleSource, samples: int, *, shift: int = 0, seed: int = 0) -> None:
        self.path, self.comm, self.readers = source.path, source.comm, source.readers
        self._source, self._samples, self._shift, self._seed = source, samples, shift, seed

    def close(self) -> None:
        """Let go of what it is a part of."""
        self._source.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a dataset, samples first."""
        return (self._samples, *self._source.shape(name)[1:])

    def chunks(self, name: str) -> tuple[int, ...]:
        """Extents of the source's chunks."""
        return self._source.chunks(name)

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the source has changed. Collective."""
        self._source.check_unchanged()

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn on rank 0 if the source's chunks are larger than the ``block`` to be read."""
        self._source.warn_of_large_chunks(name, block)

    def moves(self, sample: int) -> tuple[int, int]:
        """By how many rows and columns this sample is moved in this epoch."""
        drawn = np.random.default_rng((self._seed, _SHIFTS, self.epoch, sample))
        down, right = drawn.integers(-self._shift, self._shift + 1, 2)
        return int(down), int(right)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """The values in ``box`` of one image (1, C, H, W). Local; may run in another thread."""
        if not self._shift:
            return self._source.read(name, box)
        one, channels, *space = box
        there, here = [], []
        for wanted, extent, move in zip(space, self.shape(name)[2:], self.moves(one.start), strict=True):
            image = Interval(0, extent).intersect(Interval(wanted.start - move, wanted.stop - move))
            there.append(image)
            here.append(slice(image.start + move - wanted.start, image.stop + move - wanted.start))
        values = self._source.read(name, (one, channels, *there))
        moved = np.zeros([i.extent for i in box], values.dtype)
        moved[:, :, here[0], here[1]] = values
        return moved
