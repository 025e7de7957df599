"""Windows over samples, and blending of the network's outputs for them.

The positions and weights of windows are those of MONAI's ``sliding_window_inference(mode="gaussian")``. Each rank keeps
its block of the sample, and receives the part of a window's output that lies in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distconv.data.source import SampleSource
from distconv.distribution import Box, Distribution, Interval, block_range, default_axes
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

SIGMA = 0.125
"""Standard deviation of the Gaussian weights as a fraction of the window."""
SMALLEST = 1e-3
"""Minimum weight. At corners the Gaussian is so small that a division by it would amplify rounding errors."""


def window_starts(extent: int, window: int, overlap: float) -> list[int]:
    """Return the first index of each window along a dimension.

    Parameters
    ----------
    extent : int
        Size of the dimension.
    window : int
        Size of a window, at most ``extent``.
    overlap : float
        Fraction of a window that the next one shares.

    Returns
    -------
    list of int
        Increasing. The last window ends at ``extent``.

    Examples
    --------
    >>> window_starts(10, 4, 0.5), window_starts(4, 4, 0.5), window_starts(9, 4, 0.0)
    ([0, 2, 4, 6], [0], [0, 4, 5])
    """
    step = window if window == extent else max(1, int(window * (1 - overlap)))
    count = 1 + max(0, math.ceil((extent - window) / step))
    return [min(index * step, extent - window) for index in range(count)]


class WindowSource:
    """Source whose samples are the windows of another source's samples.

    The windows of a sample are consecutive.

    Parameters
    ----------
    source : SampleSource
    name : str
        Dataset of the samples.
    window : sequence of int
        Size of a window along the last dimensions, limited to that of the sample.
    overlap : float
        Fraction of a window that the next one shares.
    """

    def __init__(self, source: SampleSource, name: str, window: Sequence[int], overlap: float) -> None:
        self.source, self.path, self.comm, self.readers = source, source.path, source.comm, source.readers
        shape = source.shape(name)
        self.space = shape[len(shape) - len(window) :]
        self.window = tuple(min(w, extent) for w, extent in zip(window, self.space, strict=True))
        lines = (window_starts(extent, w, overlap) for extent, w in zip(self.space, self.window, strict=True))
        self.places = list(itertools.product(*lines))

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dataset ``name``, with one sample per window."""
        samples, *rest = self.source.shape(name)
        return (samples * len(self.places), *rest[: len(rest) - len(self.window)], *self.window)

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the chunk shape of the dataset ``name`` in the source."""
        return self.source.chunks(name)

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Read an index range of one window. Not collective; may run in another thread.

        Parameters
        ----------
        name : str
            Dataset.
        box : Box
            Index range (window, C, ...) with a single window.

        Returns
        -------
        numpy.ndarray
        """
        sample, position = divmod(box[0].start, len(self.places))
        begin = (0,) * (len(box) - 1 - len(self.window)) + self.places[position]
        inside = (Interval(b + i.start, b + i.stop) for b, i in zip(begin, box[1:], strict=True))
        return self.source.read(name, (Interval(sample, sample + 1), *inside))

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the source has changed. Collective."""
        self.source.check_unchanged()

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Do nothing: windows cannot be aligned with chunks.

        Parameters
        ----------
        name, block
            Not used.
        """


def blending_weights(window: Sequence[int], box: Sequence[Interval], dtype: torch.dtype) -> torch.Tensor:
    """Return the blending weights of a part of a window.

    Parameters
    ----------
    window : sequence of int
        Size of the window.
    box : sequence of Interval
        Index range of the part within the window.
    dtype : torch.dtype

    Returns
    -------
    torch.Tensor
        Gaussian weights with the shape of ``box``.
    """
    lines = []
    smallest = 1.0
    for extent in window:
        position = torch.arange(-(extent - 1) / 2, (extent - 1) / 2 + 1, dtype=torch.float)
        lines.append(torch.exp(position**2 / (-2 * (extent * SIGMA) ** 2)))
        # Of the full window, in MONAI's float32, so that all parts have the same minimum.
        smallest = float(torch.tensor(smallest) * lines[-1].min())
    part = torch.ones(())
    for line, inside in zip(lines, box, strict=True):
        part = part.unsqueeze(-1) * line[inside.start : inside.stop]
    return part.clamp(min=max(smallest, SMALLEST)).to(dtype)


class Blend:
    """Blended output of a network for one sample.

    Collective: construct it, and call its methods, on every rank of ``grid``.

    Parameters
    ----------
    grid : ProcessGrid
    space : sequence of int
        Spatial size of the sample.
    window : sequence of int
        Size of a window.
    """

    def __init__(self, grid: ProcessGrid, space: Sequence[int], window: Sequence[int]) -> None:
        self.grid, self.space, self.window = grid, tuple(space), tuple(window)
        self._dist = Distribution(grid, (None, None, *default_axes(None, 2 + len(space))[2:]))
        self._sum: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None

    def add(self, position: Sequence[int], output: DistTensor) -> None:
        """Add the output of a window. Collective.

        Parameters
        ----------
        position : sequence of int
            First index of the window along each spatial dimension.
        output : DistTensor
            Output (1, C, ...) with the spatial size of the window.
        """
        # Boundaries of the ranks' blocks of the sample, relative to the window. Each rank receives its part.
        bounds: dict[str, tuple[int, ...]] = {}
        for axis, begin, extent, full in zip(self._dist.axes[2:], position, self.window, self.space, strict=True):
            if axis is not None:
                parts = self.grid.shape[axis]
                borders = [*(block_range(full, parts, part).start for part in range(parts)), full]
                bounds[axis] = tuple(min(max(border - begin, 0), extent) for border in borders)
        there = output.redistribute(Distribution(self.grid, self._dist.axes, boundaries=bounds))
        part = there.dist.box(None, there.shape)[2:]
        shape = self._dist.local_shape((1, output.shape[1], *self.space))
        if self._sum is None or self._weight is None:
            self._sum = there.local.new_zeros(shape)
            self._weight = there.local.new_zeros((1, 1, *shape[2:]))
        # Only after the redistribution, which is collective.
        if 0 in there.local.shape:
            return
        weight = blending_weights(self.window, part, there.dtype).to(there.local.device)
        block = self._dist.box(None, (1, output.shape[1], *self.space))[2:]
        here = tuple(
            slice(begin + inside.start - own.start, begin + inside.stop - own.start)
            for begin, inside, own in zip(position, part, block, strict=True)
        )
        self._sum[(slice(None), slice(None), *here)] += there.local * weight
        self._weight[(slice(None), slice(None), *here)] += weight

    def result(self) -> DistTensor:
        """Return the weighted mean (1, C, ...). Call it after the windows that cover the sample were added."""
        assert self._sum is not None and self._weight is not None
        return DistTensor(self._sum / self._weight, self._dist, (1, self._sum.shape[1], *self.space))
