"""Mean, standard deviation and range of each channel, identical to the last bit on any number of ranks.

Each sample is summed by one rank, in blocks along the file's chunks. The sums of the samples are then added in the
order of the samples. So neither the grid nor the number of ranks changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.source import SampleSource
from distconv.distribution import Box, Interval
from distconv.errors import DataError

_MEAN, _SQUARE, _LOW, _HIGH, _COUNT = range(5)


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of a dataset: arrays of shape (C,). A dataset without channels (N, H, W) counts as one channel."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    """Standard deviation; 1 where the channel is constant, so that dividing by it is harmless."""
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def moments(file: SampleSource, name: str, *, channels: bool = True, missing: bool = False) -> Moments:
    """Return the statistics of each channel of a dataset.

    Collective: call on every rank of ``file.comm``.

    Parameters
    ----------
    file : SampleSource
        The source.
    name : str
        Dataset (N, C, [D, [H,]] W), or (N, [D, [H,]] W) without ``channels``.
    channels : bool
        True if dimension 1 counts channels. Otherwise all values of a sample count as one channel.
    missing : bool
        True leaves out NaN, which missing values are. Otherwise they raise.

    Returns
    -------
    Moments
        The statistics, identical on all ranks.

    Raises
    ------
    DataError
        On all ranks, if there are no samples or no channels, or a value cannot be read or is not finite; the error
        names the sample. With ``missing``, if a channel has no values at all.
    """
    check_same_on_all_ranks(file.comm, "moments", f"{file.path}: {name!r}, {channels=}, {missing=}")
    shape = file.shape(name)
    if len(shape) < 1 + channels:
        raise DataError(f"moments: {file.path}: {name!r} is {shape} and has no channels. Pass channels=False.")
    if not shape[0]:
        raise DataError(f"moments: {file.path}: {name!r} has no samples. Name another dataset.")
    # One row for each sample, and not a running sum: the order of additions is then the same on any number of ranks.
    partial = np.zeros((shape[0], _COUNT + missing, shape[1] if channels else 1))
    comm = file.comm

    def measure() -> None:
        for sample in range(comm.rank, shape[0], comm.size):
            partial[sample] = _sample_sums(file, name, sample, channels, missing)

    try_on_all_ranks(comm, measure, DataError)
    # A rank has zeros for the samples of other ranks. So this allreduce copies and rounds nothing, in any order.
    comm.Allreduce(MPI.IN_PLACE, partial, MPI.SUM)
    bad = np.flatnonzero(~np.isfinite(partial).all(axis=(1, 2)))
    if len(bad):
        raise DataError(
            f"{file.path}: {name!r} has NaN or infinite values in {len(bad)} samples, the first is {bad[0]}. "
            "Missing values of packed data are NaN. Leave them out by missing=True, or leave these samples out."
        )
    if missing:
        counts = partial[:, _COUNT]
        empty = np.flatnonzero(~counts.any(axis=0))
        if len(empty):
            raise DataError(f"{file.path}: all values of channel {empty[0]} of {name!r} are missing. Leave it out.")
        weights = counts / counts.sum(0)
        mean, square = ((partial[:, row] * weights).sum(0) for row in (_MEAN, _SQUARE))
    else:
        mean, square = partial[:, _MEAN].mean(0), partial[:, _SQUARE].mean(0)
    # Roundoff may make the difference negative.
    variance = np.maximum(square - mean**2, 0)
    std = np.sqrt(variance)
    low, high = partial[:, _LOW].min(0), partial[:, _HIGH].max(0)
    # Round-off leaves a constant channel a little variance.
    constant = std <= 1e-6 * np.maximum(np.abs(mean), 1e-30)
    return Moments(mean, np.where(constant, 1.0, std), low, high)


def chunk_aligned_boxes(file: SampleSource, name: str, sample: int, channels: bool = True) -> list[Box]:
    """Return disjoint boxes that cover one sample, each as high as a chunk, so that no chunk is read twice.

    Parameters
    ----------
    file, name, channels
        As in :func:`moments`.
    sample : int
        Index of the sample.

    Returns
    -------
    list of Box
        Boxes of global indices, one sample each.
    """
    first = 2 if channels else 1
    shape = file.shape(name)
    height = file.chunks(name)[first] if len(shape) > first else 1
    whole = [Interval(sample, sample + 1), *(Interval(0, extent) for extent in shape[1:])]
    if len(shape) <= first:
        return [tuple(whole)]
    rows = [Interval(i, min(i + height, shape[first])) for i in range(0, shape[first], height)]
    return [(*whole[:first], row, *whole[first + 1 :]) for row in rows]


def _sample_sums(file: SampleSource, name: str, sample: int, channels: bool, missing: bool) -> NDArray[np.float64]:
    """Return mean, mean of the squares, minimum and maximum of each channel of one sample, shape (4, C).

    If values may be ``missing``, a row with the number of the others follows.
    """
    total = np.zeros((_COUNT + 1, file.shape(name)[1] if channels else 1))
    total[_LOW], total[_HIGH] = np.inf, -np.inf
    for box in chunk_aligned_boxes(file, name, sample, channels):
        # In the order of the blocks, which depends on the file only.
        stored = file.read(name, box)[0]
        if stored.dtype.kind not in "biuf":
            raise DataError(
                f"moments: {file.path}: sample {sample} of dataset {name!r} has values of {stored.dtype}. Store real "
                "numbers."
            )
        values = stored.astype(np.float64)
        values = values.reshape(total.shape[1], -1)
        lowest = highest = values
        if missing:
            unknown, limit = np.isnan(values), np.finfo(np.float64).max
            total[_COUNT] += (~unknown).sum(1)
            lowest, highest = np.where(unknown, limit, values), np.where(unknown, -limit, values)
            values = np.where(unknown, 0.0, values)
        else:
            total[_COUNT] += values.shape[1]
        total[_MEAN] += values.sum(1)
        total[_SQUARE] += (values**2).sum(1)
        total[_LOW] = np.minimum(total[_LOW], lowest.min(1))
        total[_HIGH] = np.maximum(total[_HIGH], highest.max(1))
    total[_MEAN:_LOW] /= np.maximum(total[_COUNT], 1)
    return total[: _COUNT + missing]
