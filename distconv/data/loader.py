"""A loader that prefetches batches of samples as distributed tensors. Each rank reads only its own blocks.

Order, flips, transposition and crops of the samples depend only on the seed, the epoch and the sample, not on the grid.
So a run gets the same values on any grid. Threads read the next batches during computation, as many as the source has
readers. They must not call MPI. In the step that uses a batch, the main threads check that all ranks have read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.conversion import convert_values, default_dtype
from distconv.data.source import SampleSource
from distconv.distribution import Distribution, Interval, default_axes
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.memory_format import CHANNELS_LAST
from distconv.tensor import DistTensor

_ORDER, _FLIPS, _CROPS, _TRANSPOSES = 0, 1, 3, 4
"""Independent streams of random numbers. ``jobs.images.sources`` uses stream 2 with the same seed."""


@dataclass(frozen=True, eq=False)
class Field:
    """One dataset and its conversion to a tensor: transposed or flipped, shifted and scaled per channel, converted."""

    dataset: str
    """Name of the dataset."""
    dims: str
    """Grid axis of each dimension, such as ``"nchw"`` for images; ``-`` for a dimension that is never split.

    ``"nhw"`` fits label maps, ``"n"`` one number per sample.
    """
    dtype: torch.dtype | None = None
    """Dtype of the tensor; None selects it by the stored values.

    Then integers become int64, booleans stay booleans, and all other values, and those that are shifted or scaled,
    become float32. A value that the dtype cannot hold raises: integers are kept exactly, floating-point values may be
    rounded.
    """
    shift: NDArray[np.float64] | Sequence[float] | float | None = None
    scale: NDArray[np.float64] | Sequence[float] | float | None = None
    """Values become (value - shift) / scale; one number per channel, or one for all."""
    odd: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Factor of each channel, by the axis of a flip; -1 for a sign-flipped channel, such as a velocity along it."""
    exchanged: Sequence[tuple[int, float]] = ()
    """Source channel and factor of each channel of a transposed sample. If empty, channels keep their order."""
    memory_format: torch.memory_format = torch.contiguous_format
    """``torch.channels_last`` or ``channels_last_3d`` for images or volumes with channels.

    The threads that read the samples convert them.
    """
    fill: float | None = None
    """Value in place of NaN, which missing values are, after shift and scale; None keeps NaN."""

    @property
    def has_channels(self) -> bool:
        """True if dimension 1 counts channels. Otherwise the spatial dimensions follow the sample dimension."""
        return len(self.dims) > 1 and self.dims[1] not in "dhw"

    @property
    def computes(self) -> bool:
        """True if values are multiplied or added to. Otherwise they are only moved."""
        given = (self.shift, self.scale, self.fill)
        return bool(self.odd) or bool(self.exchanged) or any(each is not None for each in given)


@dataclass(frozen=True, eq=False)
class Batch:
    """One global mini-batch: a tensor per field."""

    samples: tuple[int, ...]
    """Indices of the samples in the source, in the order of the batch."""
    tensors: tuple[Any, ...]
    """DistTensors, or what a job's own loader returns."""


class EpochLoader(ABC):
    """Mini-batches of samples, epoch by epoch, in an order that depends only on the seed and the epoch.

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
        """Store the options.

        Parameters
        ----------
        samples : int
            Number of samples.
        batch : int
            Global batch size.
        of : tuple of object and str
            Location of the samples and what they are, for the error.
        seed : int
            Seed of the order.
        shuffle : bool
            True draws a new order for each epoch. Otherwise samples come in the order of the source.
        drop_last : bool
            True drops a last batch that is smaller. Otherwise it is returned.

        Raises
        ------
        DataError
            If there are not enough samples for a batch.
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
        """Return the indices of the samples in the order of this epoch, shape (samples,)."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, _ORDER, epoch)).permutation(self.samples)

    def batches(self, epoch: int, start: int = 0) -> list[tuple[int, ...]]:
        """Return the samples of each batch of an epoch.

        Parameters
        ----------
        epoch : int
            The epoch.
        start : int
            Number of batches to skip.

        Returns
        -------
        list of tuple of int
            Indices of the samples in the source, one tuple for each batch.
        """
        order = self.order(epoch)
        return [tuple(map(int, order[i * self.batch : (i + 1) * self.batch])) for i in range(start, self.steps)]

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        Collective: call on every rank, and take each batch on every rank.

        Parameters
        ----------
        number : int
            The epoch.
        start : int
            Number of batches to skip.

        Yields
        ------
        Batch
            The next batch.
        """


class Loader(EpochLoader):
    """Batches of samples as distributed tensors over a grid."""

    def __init__(
        self,
        file: SampleSource,
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
        """Check the fields against the source.

        Collective over ``grid``.

        Parameters
        ----------
        file : SampleSource
            Source of the samples. The caller closes it.
        fields : sequence of Field
            The datasets to read; each batch has a tensor for each.
        grid : ProcessGrid
            Grid of the tensors.
        batch : int
            Global batch size.
        seed, shuffle, drop_last
            As in :class:`EpochLoader`.
        mirror : str
            Axes along which a sample is flipped with probability one half, for example "hw".
        transpose : bool
            True swaps rows and columns of a sample with probability one half. Their numbers must be equal.
        crop : mapping of str to int, optional
            Size of a random crop along some axes, ``{"h": 256, "w": 256}``.
        ahead : int
            Number of batches that are read while the model computes.
        device : torch.device or str
            Device of the tensors.

        Raises
        ------
        DataError
            If there are not enough samples for a batch, or a field, ``mirror`` or ``crop`` does not fit them.
        MismatchError
            If ranks pass different options.
        """
        options = f"{batch=}, {seed=}, {shuffle=}, {drop_last=}, {mirror=}, {transpose=}, {crop=}"
        # First, because the checks below depend on the options and may raise on one rank alone.
        check_same_on_all_ranks(grid.world, "Loader", f"{list(fields)} of {file.path}, {options}")
        if not fields:
            raise DataError(f"Loader: no fields of {file.path} are named. Give at least one Field.")
        samples, of = file.shape(fields[0].dataset)[0], (file.path, f"samples of {fields[0].dataset!r}")
        super().__init__(samples, batch, of, seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.file, self.grid, self.device = file, grid, torch.device(device)
        self.fields = tuple(resolve_field(each, file, samples) for each in fields)
        self.mirror, self.transpose, self.crop, self.ahead = mirror, transpose, dict(crop or {}), ahead
        self._check_mirror()
        self._check_crop()
        first = self.fields[0]
        block = self._distribution(first).local_shape((self.samples, *self._extents(first)))[1:]
        file.warn_of_large_chunks(first.dataset, block)

    def mirrored_axes(self, epoch: int, sample: int) -> str:
        """Return the axes along which this sample is flipped in this epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        sample : int
            Index of the sample in the data set.

        Returns
        -------
        str
        """
        if not self.mirror:
            return ""
        # A generator for each sample and epoch: a draw depends on no other sample, so not on the rank that reads it.
        drawn = np.random.default_rng((self.seed, _FLIPS, epoch, sample)).integers(0, 2, len(self.mirror))
        return "".join(axis for axis, flip in zip(self.mirror, drawn, strict=True) if flip)

    def is_transposed(self, epoch: int, sample: int) -> bool:
        """Return True if rows and columns of this sample are swapped in this epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        sample : int
            Index of the sample in the data set.

        Returns
        -------
        bool
        """
        return self.transpose and bool(np.random.default_rng((self.seed, _TRANSPOSES, epoch, sample)).integers(2))

    def crop_offsets(self, epoch: int, sample: int) -> dict[str, int]:
        """Return the first index of this sample's crop in this epoch, for each axis that is cropped.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        sample : int
            Index of the sample in the data set.

        Returns
        -------
        dict of str to int
        """
        random = np.random.default_rng((self.seed, _CROPS, epoch, sample))
        sizes = self._sample_sizes()
        return {axis: int(random.integers(0, sizes[axis] - extent + 1)) for axis, extent in self.crop.items()}

    def _sample_sizes(self) -> dict[str, int]:
        """Return the size of the samples along each axis of any field."""
        return {
            axis: extent
            for each in self.fields
            for axis, extent in zip(each.dims[1:], self.file.shape(each.dataset)[1:], strict=True)
            if axis not in "c-"
        }

    def _check_mirror(self) -> None:
        known = {axis for each in self.fields for axis in each.dims[1:]} - set("nc-")
        odd = sorted({axis for each in self.fields for axis in each.odd})
        for option, axes in (("mirror", self.mirror), ("odd", odd)):
            if not known.issuperset(axes) or len(set(axes)) != len(axes):
                listed = "".join(axes)
                raise DataError(
                    f"Loader: {option} along {listed!r}, but the samples extend along {''.join(sorted(known))!r}. "
                    "Name some of these axes, each once."
                )
        moved = {*self.mirror, *self.crop, *("hw" if self.transpose else "")}
        for each in self.fields:
            axes = each.dims[1:]
            if axes.count("-") > (0 if known.intersection(axes) else 1) and not moved.issubset(axes):
                raise DataError(
                    f"Loader: {each.dataset!r} with dims {each.dims!r} does not say which dimension is which of "
                    f"{''.join(sorted(moved))!r}, along which samples are changed. Name it: an axis that the grid has "
                    "not splits nothing."
                )

    def _check_crop(self) -> None:
        sizes = self._sample_sizes()
        for each in self.fields:
            for axis, extent in zip(each.dims[1:], self.file.shape(each.dataset)[1:], strict=True):
                if axis in self.crop and extent != sizes.get(axis, extent):
                    raise DataError(
                        f"{self.file.path}: {each.dataset!r} has {extent} along {axis}, where others have "
                        f"{sizes[axis]}. Only samples of equal sizes can be cropped together: resize them."
                    )
        for axis, extent in self.crop.items():
            if not 0 < extent <= sizes.get(axis, 0):
                raise DataError(
                    f"{self.file.path}: crop {axis}={extent}: samples have {sizes.get(axis, 'nothing')} there"
                )
        height, width = (self.crop.get(axis, sizes.get(axis, 0)) for axis in "hw")
        if self.transpose and height != width:
            raise DataError(
                f"{self.file.path}: samples of {height} x {width} cannot be transposed: crop squares of them"
            )

    def _extents(self, each: Field) -> tuple[int, ...]:
        """Return the shape of a sample of a field after cropping."""
        sizes = self.file.shape(each.dataset)[1:]
        return tuple(self.crop.get(axis, extent) for axis, extent in zip(each.dims[1:], sizes, strict=True))

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, and read the next ones in the background.

        Collective: call on every rank, and take each batch on every rank.

        Parameters
        ----------
        number : int
            The epoch.
        start : int
            Number of batches to skip.

        Yields
        ------
        Batch
            The next batch, with DistTensors on the loader's device.

        Raises
        ------
        DataError
            On all ranks, if the file has changed since it was opened; in the step of a batch, if any rank could not
            read its blocks of the batch.
        """
        check_same_on_all_ranks(self.grid.world, "epoch of a Loader", f"{number} from step {start} on")
        self.file.check_unchanged()
        batches = self.batches(number, start)
        waiting: deque[_PendingBatch] = deque()
        with ThreadPoolExecutor(self.file.readers, "distconv-loader") as readers:
            try:
                for index, samples in enumerate(batches):
                    if not waiting:
                        waiting.append(self._submit_batch(readers, number, samples))
                    # A read may fail on one rank. All raise in the step that needs the batch, not when the thread
                    # fails.
                    blocks = try_on_all_ranks(self.grid.world, waiting.popleft().result, DataError)
                    # Only now, so that at most `ahead` batches are in memory in addition to this one.
                    for later in batches[index + 1 + len(waiting) : index + 1 + self.ahead]:
                        waiting.append(self._submit_batch(readers, number, later))
                    tensors = (self._tensor(f, b, len(samples)) for f, b in zip(self.fields, blocks, strict=True))
                    yield Batch(samples, tuple(tensors))
            finally:
                # The caller may stop in the middle of an epoch, and must not wait for batches that it does not need.
                readers.shutdown(wait=False, cancel_futures=True)

    def _distribution(self, each: Field) -> Distribution:
        return Distribution(self.grid, default_axes(each.dims, len(self.file.shape(each.dataset))))

    def _tensor(self, each: Field, block: torch.Tensor, samples: int) -> DistTensor:
        shape = (samples, *self._extents(each))
        strides = None
        if each.memory_format is not torch.contiguous_format:
            strides = torch.empty(shape, device="meta", memory_format=each.memory_format).stride()
        # Asynchronous only from pinned memory.
        return DistTensor(block.to(self.device, non_blocking=True), self._distribution(each), shape, strides)

    def _submit_batch(self, readers: Executor, epoch: int, samples: tuple[int, ...]) -> _PendingBatch:
        """Start reading a batch, each sample of each field as its own task."""
        blocks, rows = [], []
        for each in self.fields:
            shape = (len(samples), *self._extents(each))
            mine, *space = self._distribution(each).box(None, shape)
            # From pinned memory the copy to a GPU overlaps with the host's work.
            pinned = self.device.type == "cuda"
            extents = (mine.extent, *(i.extent for i in space))
            block = torch.empty(
                extents, dtype=each.dtype, device="cpu", pin_memory=pinned, memory_format=each.memory_format
            )
            blocks.append(block)
            # The samples of this rank; other ranks read the others.
            for row, sample in enumerate(samples[mine.start : mine.stop]):
                rows.append(readers.submit(self._read, block[row], each, sample, space, epoch))
        return _PendingBatch(blocks, rows)

    def _read(self, into: torch.Tensor, each: Field, sample: int, space: list[Interval], epoch: int) -> None:
        what = f"{self.file.path}: sample {sample} of dataset {each.dataset!r}"
        into.copy_(convert_values(self._read_transformed(each, sample, space, epoch), into.dtype, what))

    def _read_transformed(self, each: Field, sample: int, space: list[Interval], epoch: int) -> NDArray[Any]:
        """Return the values in ``space`` of one sample, which is cropped, then flipped, then transposed."""
        transposed = each.dims.endswith("hw") and self.is_transposed(epoch, sample)
        there = _region_before_transpose(each, space) if transposed else space
        # The order of a transposed sample: crop, flip, transpose, so the region is followed backwards.
        values = self._read_flipped(each, sample, there, epoch)
        if transposed:
            values = values.swapaxes(-1, -2)
            if each.exchanged:
                sources = each.exchanged[space[0].start : space[0].stop]
                # Read as one interval of channels, from the first to the last that is needed.
                values = values[[source - there[0].start for source, _ in sources]]
                values = values * _per_channel(each, [factor for _, factor in each.exchanged], space, values)
        if each.shift is not None:
            values = values - _per_channel(each, each.shift, space, values)
        if each.scale is not None:
            values = values / _per_channel(each, each.scale, space, values)
        return values if each.fill is None else np.where(np.isnan(values), values.dtype.type(each.fill), values)

    def _read_flipped(self, each: Field, sample: int, space: list[Interval], epoch: int) -> NDArray[Any]:
        """Return the values in ``space`` of one sample, which is cropped and then flipped."""
        flipped, begins = self.mirrored_axes(epoch, sample), self.crop_offsets(epoch, sample)
        # Index i of the flipped sample is E - 1 - i of the one in the file: read the flipped box, then reverse it.
        box, steps = [Interval(sample, sample + 1)], []
        for axis, interval, extent in zip(each.dims[1:], space, self._extents(each), strict=True):
            is_flipped, begin = axis in flipped, begins.get(axis, 0)
            there = Interval(extent - interval.stop, extent - interval.start) if is_flipped else interval
            box.append(Interval(begin + there.start, begin + there.stop))
            steps.append(slice(None, None, -1 if is_flipped else None))
        values: NDArray[Any] = np.asarray(self.file.read(each.dataset, tuple(box))[0][tuple(steps)])
        if each.computes:
            if values.dtype.kind not in "biuf":
                raise DataError(
                    f"{self.file.path}: sample {sample} of dataset {each.dataset!r} has values of {values.dtype}, "
                    "which cannot be shifted, scaled or flipped in sign. Store real numbers."
                )
            # float32 does not hold all integers.
            exact = each.dtype == torch.float64 or not each.dtype.is_floating_point  # type: ignore[union-attr]
            values = values.astype(np.result_type(values, np.float64 if exact else np.float32), copy=False)
        for axis in flipped:
            if axis in each.odd:
                values = values * _per_channel(each, each.odd[axis], space, values)
        return values


@dataclass(frozen=True)
class _PendingBatch:
    """A batch that is being read."""

    blocks: list[torch.Tensor]
    rows: list[Future[None]]

    def result(self) -> list[torch.Tensor]:
        """Wait until all is read, and return this rank's block of each field."""
        for row in self.rows:
            row.result()
        return self.blocks


def _region_before_transpose(each: Field, space: list[Interval]) -> list[Interval]:
    """Return the region of the stored sample for ``space`` of the transposed one: channels (if any), rows, columns."""
    *channels, rows, columns = space
    sources = [source for source, _ in each.exchanged[space[0].start : space[0].stop]]
    if sources:
        channels = [Interval(min(sources), max(sources) + 1)]
    return [*channels, columns, rows]


def _per_channel(each: Field, numbers: Any, space: list[Interval], values: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of the channels in ``space``, with the dtype and the number of dimensions of ``values``."""
    # In the dtype of the values, so that float32 values stay float32.
    own = np.asarray(numbers, values.dtype)
    if own.size > 1:
        own = own[space[0].start : space[0].stop]
    return own.reshape(-1, *(1,) * (values.ndim - 1)) if values.ndim else own.reshape(())


def resolve_field(each: Field, source: SampleSource, samples: int) -> Field:
    """Check a field against its source; return it with its dtype, and its numbers as arrays.

    Collective if the source must determine the dtype by reading.

    Parameters
    ----------
    each : Field
        The field.
    source : SampleSource
        The source.
    samples : int
        Number of samples of the other fields.

    Returns
    -------
    Field
        The complete field.

    Raises
    ------
    DataError
        If the source has no such dataset, or the field does not fit it.
    """
    what = f"Loader: Field({each.dataset!r}, {each.dims!r})"
    shape = source.shape(each.dataset)
    if len(each.dims) != len(shape) or each.dims[:1] not in ("n", "-"):
        raise DataError(
            f"{what}: the dataset is {shape}. Give dims a letter for each of the {len(shape)} dimensions, n for the "
            'samples first: "nchw", "nhw", "n".'
        )
    if shape[0] != samples:
        raise DataError(f"{what}: it has {shape[0]} samples, other fields {samples}. Store as many of each.")
    channels = shape[1] if each.has_channels else 1
    changed: dict[str, Any] = {}
    for name, numbers in (("shift", each.shift), ("scale", each.scale)):
        if numbers is None:
            continue
        own = np.asarray(numbers, np.float64).reshape(-1)
        if own.size not in (1, channels) or not np.isfinite(own).all() or (name == "scale" and not own.all()):
            few = np.array2string(own, threshold=6, edgeitems=2, separator=", ")
            raise DataError(
                f"{what}: {name} is {few} ({own.size} numbers) for {channels} channels. Give one finite number for "
                f"each channel, or one for all{'; none may be 0' if name == 'scale' else ''}. For samples without "
                "channels, call moments with channels=False."
            )
        changed[name] = own
    for name, factors in (
        *((f"odd[{axis!r}]", each.odd[axis]) for axis in each.odd),
        ("exchanged", each.exchanged),
    ):
        if len(factors) != channels and (factors or name != "exchanged"):
            raise DataError(f"{what}: {name} has {len(factors)} entries for {channels} channels. Give one for each.")
    if any(not 0 <= channel < channels for channel, _ in each.exchanged):
        raise DataError(
            f"{what}: exchanged names channels {[c for c, _ in each.exchanged]} of {channels}. Count from 0."
        )
    formats = {torch.contiguous_format, CHANNELS_LAST.get(len(shape) if each.has_channels else 0)}
    if each.memory_format not in formats:
        raise DataError(
            f"{what}: memory_format is {each.memory_format}, but the dataset is {shape}. channels_last is for images "
            "(nchw), channels_last_3d for volumes (ncdhw)."
        )
    if each.dtype is not None and not isinstance(each.dtype, torch.dtype):
        raise DataError(f"{what}: dtype is {each.dtype!r}. Give one of torch, such as torch.float32.")
    if each.dtype is None:
        known = getattr(source, "dtype", None)
        changed["dtype"] = torch.float32 if each.computes or known is None else default_dtype(known(each.dataset))
    return replace(each, **changed)
