"""A source whose samples are resized. Each rank reads and computes only what its own boxes need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks
from distconv.data.source import SampleSource
from distconv.distribution import Box, Interval
from distconv.errors import DataError


class Resized:
    """A source of resized samples: the last dimensions of the named datasets have other sizes.

    Values are interpolated linearly, as ``F.interpolate(mode="bilinear")`` does. Collective: construct on every rank.

    Parameters
    ----------
    source : SampleSource
        The source to resize.
    extents : mapping of str to sequence of int
        New sizes of the last dimensions, by dataset. Datasets that are not named stay as they are.
    nearest : collection of str
        Datasets that take the nearest value instead (``mode="nearest-exact"``), such as label maps.

    Raises
    ------
    DataError
        If there are more sizes than a sample has dimensions, one is below 1, or ``nearest`` names other datasets.
    MismatchError
        If ranks pass different sizes.
    """

    def __init__(
        self, source: SampleSource, extents: Mapping[str, Sequence[int]], *, nearest: Collection[str] = ()
    ) -> None:
        self.source, self.path, self.comm, self.readers = source, source.path, source.comm, source.readers
        self._extents = {name: tuple(sizes) for name, sizes in extents.items()}
        self._nearest = frozenset(nearest)
        check_same_on_all_ranks(self.comm, "resizing", f"{sorted(self._extents.items())}, {sorted(self._nearest)}")
        for name, sizes in self._extents.items():
            shape = source.shape(name)
            if len(sizes) >= len(shape) or min(sizes, default=1) < 1 or 0 in shape:
                raise DataError(f"{self.path}: samples of {name!r}, {shape[1:]}, cannot be resized to {sizes}")
        if unused := sorted(self._nearest - self._extents.keys()):
            raise DataError(
                f"Resized: nearest names {', '.join(map(repr, unused))}, but resized are "
                f"{', '.join(map(repr, self._extents))}. Name only resized datasets."
            )

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dataset with the new sizes."""
        shape, sizes = self.source.shape(name), self._extents.get(name, ())
        return (*shape[: len(shape) - len(sizes)], *sizes)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a dataset's values as :meth:`read` returns them: interpolated ones are floating-point."""
        known = getattr(self.source, "dtype", None)
        stored = np.dtype("f4") if known is None else known(name)
        resized = self.shape(name) != self.source.shape(name) and name not in self._nearest
        return np.result_type(stored, np.float32) if resized else stored

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the approximate shape of a chunk of the dataset in the new sizes."""
        pairs = zip(self.source.chunks(name), self.source.shape(name), self.shape(name), strict=True)
        return tuple(max(1, chunk * new // old) for chunk, old, new in pairs)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box``. Not collective; may run in another thread.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Global indices in the new sizes, samples first.

        Returns
        -------
        ndarray
        """
        steps: list[tuple[int, _Resampling]] = []
        there = list(box)
        for axis, (wanted, old, new) in enumerate(zip(box, self.source.shape(name), self.shape(name), strict=True)):
            if old != new and wanted.extent:
                line = _Resampling(wanted, old, new, name in self._nearest)
                # Only the source values that the wanted ones are computed from.
                there[axis] = line.needs
                steps.append((axis, line))
        values: NDArray[Any] = self.source.read(name, tuple(there))
        for axis, line in steps:
            values = line.of(values, axis)
        return values

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the source has changed. Collective."""
        self.source.check_unchanged()

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn on rank 0 if the source's chunks are larger than what is read for ``block``.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : tuple of int
            Shape in the new sizes, without the sample dimension.
        """
        pairs = zip(block, self.source.shape(name)[1:], self.shape(name)[1:], strict=True)
        self.source.warn_of_large_chunks(name, tuple(-(-extent * old // new) for extent, old, new in pairs))


class _Resampling:
    """Resampling along one dimension: the indices ``wanted`` of ``new`` values, from ``old`` values."""

    def __init__(self, wanted: Interval, old: int, new: int, nearest: bool) -> None:
        # Centers of pixels, as in torch.nn.functional.interpolate with align_corners=False and mode="nearest-exact".
        place = (np.arange(wanted.start, wanted.stop) + 0.5) * (old / new)
        if nearest:
            self._low = self._high = np.minimum(place.astype(np.int64), old - 1)
            self._weight = None
        else:
            place = np.maximum(place - 0.5, 0)
            self._low = np.minimum(place.astype(np.int64), old - 1)
            self._high = np.minimum(self._low + 1, old - 1)
            self._weight = place - self._low
        self.needs = Interval(int(self._low[0]), int(self._high[-1]) + 1)

    def of(self, values: NDArray[Any], axis: int) -> NDArray[Any]:
        """Return the wanted values; ``values`` holds the indices ``needs`` along ``axis``."""
        low = values.take(self._low - self.needs.start, axis)
        if self._weight is None:
            return low
        # float32 does not hold all values of wider dtypes.
        dtype = np.float64 if values.dtype.itemsize > 4 else np.float32
        weight = self._weight.astype(dtype).reshape(-1, *(1,) * (values.ndim - 1 - axis))
        high = values.take(self._high - self.needs.start, axis)
        return low * (1 - weight) + high * weight  # type: ignore[no-any-return]
