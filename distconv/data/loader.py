"""A loader that reads ahead: batches of samples as distributed tensors, each rank reading only its own blocks.

The order of the samples, their mirroring, transposition and crops follow from the seed, the epoch and the sample alone,
never from the grid.
Threads read the next batches meanwhile, as many as the source has readers. They make no MPI call: whether all ranks
could read is agreed by the main threads at the step that the batch belongs to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distconv.communication.agreement import together
from distconv.data.source import Source
from distconv.distribution import Distribution, Interval, default_axes
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

_ORDER, _MIRRORS, _CROPS, _TRANSPOSES = 0, 1, 3, 4
"""Streams of random numbers that must not repeat each other; 2 is a job's."""


@dataclass(frozen=True, eq=False)
class Field:
    """One dataset and how its values become a tensor: mirrored, shifted and scaled per channel, converted."""

    dataset: str
    dims: str
    """Grid axis of each dimension: ``"nchw"`` for images, ``"nhw"`` for label maps."""
    dtype: torch.dtype = torch.float32
    shift: NDArray[np.float64] | None = None
    scale: NDArray[np.float64] | None = None
    """Values become (value - shift) / scale; one number per channel."""
    odd: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Per axis the factor of each channel when the sample is mirrored along it: -1 for a velocity across the mirror."""
    exchanged: Sequence[tuple[int, float]] = ()
    """For each channel of the transposed sample the channel that it comes from and a factor; empty: as they are."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One global mini-batch: a tensor per field."""

    samples: tuple[int, ...]
    """Indices in the file, in the order of the batch."""
    tensors: tuple[Any, ...]
    """DistTensors, or what a job's own loader makes."""


class Epochs(ABC):
    """Mini-batches of samples, epoch after epoch, in an order that follows from the seed and the epoch alone.

    The last batch of an epoch may be smaller, or is dropped.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        of: tuple[object, str],
        *,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        """``of`` says in an error where the samples are, and what they are.

        Raises
        ------
        DataError
            If no batch can be made of the samples.
        """
        self.samples, self.batch, self.seed, self.shuffle, self.drop_last = samples, batch, seed, shuffle, drop_last
        if batch < 1 or self.steps < 1:
            where, what = of
            raise DataError(f"{where}: no batch of {batch} can be made of the {samples} {what}")

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The samples in the order of this epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, _ORDER, epoch)).permutation(self.samples)

    def batches(self, epoch: int, start: int = 0) -> list[tuple[int, ...]]:
        """The samples of each batch of this epoch from step ``start`` on."""
        order = self.order(epoch)
        return [tuple(map(int, order[i * self.batch : (i + 1) * self.batch])) for i in range(start, self.steps)]

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on. Collective, as is each batch."""


class Loader(Epochs):
    """Batches of ``batch`` samples over ``grid``. The last batch of an epoch may be smaller, or is dropped."""

    def __init__(
        self,
        file: Source,
        fields: Sequence[Field],
        grid: ProcessGrid,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        mirror: str = "",
        transpose: bool = False,
        crop: Mapping[str, int] | None = None,
        ahead: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """``mirror`` names the axes along which a sample is mirrored with probability one half, for example "hw".

        ``transpose``: its rows become its columns with probability one half, too; both are equally many then.
        ``crop`` is how much is taken of a sample along some axes, ``{"h": 256, "w": 256}``, at a place drawn for it.
        ``ahead``: batches that are read while the model works on one.

        Raises
        ------
        DataError
            If no batch can be made of the samples.
        """
        samples, of = file.shape(fields[0].dataset)[0], (file.path, f"samples of {fields[0].dataset!r}")
        super().__init__(samples, batch, of, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.file, self.fields, self.grid, self.device = file, tuple(fields), grid, torch.device(device)
        self.mirror, self.transpose, self.crop, self.ahead = mirror, transpose, dict(crop or {}), ahead
        self._check_crop()
        first = self.fields[0]
        block = self._distribution(first).local_shape((self.samples, *self._extents(first)))[1:]
        file.warn_of_large_chunks(first.dataset, block)

    def mirrored(self, epoch: int, sample: int) -> str:
        """The axes along which this sample is mirrored in this epoch."""
        if not self.mirror:
            return ""
        drawn = np.random.default_rng((self.seed, _MIRRORS, epoch, sample)).integers(0, 2, len(self.mirror))
        return "".join(axis for axis, flip in zip(self.mirror, drawn, strict=True) if flip)

    def transposed(self, epoch: int, sample: int) -> bool:
        """Whether rows and columns of this sample change places in this epoch."""
        return self.transpose and bool(np.random.default_rng((self.seed, _TRANSPOSES, epoch, sample)).integers(2))

    def cropped(self, epoch: int, sample: int) -> dict[str, int]:
        """Where the part begins that is taken of this sample in this epoch, along each axis that is cropped."""
        random = np.random.default_rng((self.seed, _CROPS, epoch, sample))
        whole = self._whole()
        return {axis: int(random.integers(0, whole[axis] - extent + 1)) for axis, extent in self.crop.items()}

    def _whole(self) -> dict[str, int]:
        """Extents of the samples along the axes of all fields."""
        return {
            axis: extent
            for each in self.fields
            for axis, extent in zip(each.dims[1:], self.file.shape(each.dataset)[1:], strict=True)
        }

    def _check_crop(self) -> None:
        whole = self._whole()
        for axis, extent in self.crop.items():
            if not 0 < extent <= whole.get(axis, 0):
                raise DataError(
                    f"{self.file.path}: crop {axis}={extent}: samples have {whole.get(axis, 'nothing')} there"
                )
        height, width = (self.crop.get(axis, whole.get(axis, 0)) for axis in "hw")
        if self.transpose and height != width:
            raise DataError(
                f"{self.file.path}: samples of {height} x {width} cannot be transposed: crop squares of them"
            )

    def _extents(self, each: Field) -> tuple[int, ...]:
        """Those of a sample as the loader gives it."""
        whole = self.file.shape(each.dataset)[1:]
        return tuple(self.crop.get(axis, extent) for axis, extent in zip(each.dims[1:], whole, strict=True))

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on. Collective, as is each batch.

        Raises
        ------
        DataError
            On all ranks: if the file has changed since it was opened, or, in the step that a batch belongs to, if any
            rank could not read its part.
        """
        self.file.check_unchanged()
        batches = self.batches(number, start)
        waiting: deque[_Reading] = deque()
        with ThreadPoolExecutor(self.file.readers, "distconv-loader") as readers:
            try:
                for index, samples in enumerate(batches):
                    if not waiting:
                        waiting.append(self._begin(readers, number, samples))
                    blocks = together(self.grid.world, waiting.popleft().result, DataError)
                    for later in batches[index + 1 + len(waiting) : index + 1 + self.ahead]:
                        waiting.append(self._begin(readers, number, later))
                    tensors = (self._tensor(f, b, len(samples)) for f, b in zip(self.fields, blocks, strict=True))
                    yield Batch(samples, tuple(tensors))
            finally:
                readers.shutdown(wait=False, cancel_futures=True)

    def _distribution(self, each: Field) -> Distribution:
        return Distribution(self.grid, default_axes(each.dims, len(self.file.shape(each.dataset))))

    def _tensor(self, each: Field, block: torch.Tensor, samples: int) -> DistTensor:
        shape = (samples, *self._extents(each))
        return DistTensor(block.to(self.device, non_blocking=True), self._distribution(each), shape)

    def _begin(self, readers: Executor, epoch: int, samples: tuple[int, ...]) -> _Reading:
        """Let a batch be read, each sample of each field by itself."""
        blocks, rows = [], []
        for each in self.fields:
            shape = (len(samples), *self._extents(each))
            mine, *space = self._distribution(each).box(None, shape)
            # A GPU takes pinned memory while the host goes on.
            block = torch.empty(
                (mine.extent, *(i.extent for i in space)), dtype=each.dtype, pin_memory=self.device.type == "cuda"
            )
            blocks.append(block)
            for row, sample in enumerate(samples[mine.start : mine.stop]):
                rows.append(readers.submit(self._read, block.numpy()[row], each, sample, space, epoch))
        return _Reading(blocks, rows)

    def _read(self, into: NDArray[Any], each: Field, sample: int, space: list[Interval], epoch: int) -> None:
        into[...] = self._prepared(each, sample, space, epoch)

    def _prepared(self, each: Field, sample: int, space: list[Interval], epoch: int) -> NDArray[Any]:
        """The values in ``space`` of one sample, which is cropped, then mirrored, then transposed."""
        transposed = self.transposed(epoch, sample)
        there = _before_transposing(each, space) if transposed else space
        values = self._mirrored_values(each, sample, there, epoch)
        if transposed:
            values = values.swapaxes(-1, -2)
            if each.exchanged:
                sources = each.exchanged[space[0].start : space[0].stop]
                values = values[[source - there[0].start for source, _ in sources]]
                values = values * _per_channel([factor for _, factor in sources], values)
        if each.shift is not None:
            values = values - _per_channel(each.shift[space[0].start : space[0].stop], values)
        if each.scale is not None:
            values = values / _per_channel(each.scale[space[0].start : space[0].stop], values)
        return values

    def _mirrored_values(self, each: Field, sample: int, space: list[Interval], epoch: int) -> NDArray[Any]:
        """The values in ``space`` of one sample, which is cropped and then mirrored."""
        mirrored, begins = self.mirrored(epoch, sample), self.cropped(epoch, sample)
        # Index i of the mirrored sample is E - 1 - i of the one in the file: read the mirrored box, then reverse it.
        box, steps = [Interval(sample, sample + 1)], []
        for axis, interval, extent in zip(each.dims[1:], space, self._extents(each), strict=True):
            turned, begin = axis in mirrored, begins.get(axis, 0)
            there = Interval(extent - interval.stop, extent - interval.start) if turned else interval
            box.append(Interval(begin + there.start, begin + there.stop))
            steps.append(slice(None, None, -1 if turned else None))
        values: NDArray[Any] = self.file.read(each.dataset, tuple(box))[0][tuple(steps)]
        values = values.astype(np.result_type(values, _numpy(each.dtype)), copy=False)
        for axis in mirrored:
            if axis in each.odd:
                values = values * _per_channel(each.odd[axis][space[0].start : space[0].stop], values)
        return values


@dataclass(frozen=True)
class _Reading:
    """A batch that is being read."""

    blocks: list[torch.Tensor]
    rows: list[Future[None]]

    def result(self) -> list[torch.Tensor]:
        """This rank's block of each field, when all is read."""
        for row in self.rows:
            row.result()
        return self.blocks


def _before_transposing(each: Field, space: list[Interval]) -> list[Interval]:
    """Where the values in ``space`` of a transposed sample, channels (if any), rows, columns, are in the sample."""
    *channels, rows, columns = space
    sources = [source for source, _ in each.exchanged[space[0].start : space[0].stop]]
    if sources:
        channels = [Interval(min(sources), max(sources) + 1)]
    return [*channels, columns, rows]


def _numpy(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _per_channel(numbers: Sequence[float] | NDArray[np.float64], values: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(numbers, values.dtype).reshape(-1, *(1,) * (values.ndim - 1))
