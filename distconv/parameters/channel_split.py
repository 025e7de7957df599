"""Which rank has which channels and filters of a layer whose channels are split over grid axis ``c``.

C channels of x and F filters of y are split over p ranks in balanced blocks. The weights form a grid of b channel
blocks by p / b filter blocks; index i along the axis holds the weights from channel block i % b to filter block i //
b::

    gather-x    b = 1      needs all of x; computes F/p filters, which are the block of y that it owns
    reduce-y    b = p      needs its own block of x; computes a partial sum of all of y, which is reduce-scattered
    2-D         between    needs C/b channels and computes F b/p filters: neither x nor y is communicated completely

Weights are never communicated. With groups, filters are split, and an index needs the channels of its own groups.

Pure arithmetic: this module sends no message. ``layers.common.sharded_weights`` has the operators.

Source: Dryden et al. 2019, III-D, which leaves the choice of distributions open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from distconv.distribution import Distribution, Interval, block_range
from distconv.errors import ShapeError
from distconv.grid import ProcessGrid

AXIS = "c"
"""The grid axis that splits channels."""


def linear_axes(ndim: int) -> tuple[str | None, ...]:
    """Return the grid axes that split the input and the output of a linear layer.

    Samples come first and features last; dimensions between them are not split.

    Parameters
    ----------
    ndim : int
        Number of dimensions of the input.

    Returns
    -------
    tuple[str or None, ...]

    Examples
    --------
    >>> linear_axes(3)
    ('n', None, 'c')
    """
    return ("n", *(None,) * (ndim - 2), AXIS)[:ndim]


@dataclass(frozen=True)
class ChannelSplit:
    """The split of one layer's channels and filters.

    Parameters
    ----------
    channels, filters : int
        C and F.
    groups : int
        Groups of the convolution; 1 for a linear layer.
    parts : int
        p, the number of ranks along the axis.
    blocks : int
        b, the number of channel blocks, which divides p.

    Raises
    ------
    ShapeError
        If groups do not divide evenly over the ranks.
    """

    channels: int
    filters: int
    groups: int
    parts: int
    blocks: int

    def __post_init__(self) -> None:
        if not groups_divide(self.groups, self.filters, self.parts) or (self.groups > 1 and self.blocks > 1):
            raise ShapeError(
                f"convolution with groups={self.groups}: C={self.channels} channels and F={self.filters} filters do "
                f"not divide over the {self.parts} ranks of axis {AXIS!r}: the groups must be a multiple of the ranks, "
                "or the ranks of the groups and the filters of the ranks; use fewer ranks along c, or other axes"
            )

    def input_channels(self, index: int) -> Interval:
        """Return the channels of x from which index ``index`` computes.

        Parameters
        ----------
        index : int
            Coordinate along the axis ``c``.

        Returns
        -------
        Interval
        """
        if self.groups == 1:
            return _block(self.channels, self.blocks, index % self.blocks)
        filters, per_group = self.output_filters(index), self.filters // self.groups
        # Outwards to whole groups: a group of which this index computes some filters is needed completely.
        first, last = filters.start // per_group, -(-filters.stop // per_group)
        return Interval(first * self.channels // self.groups, last * self.channels // self.groups)

    def output_filters(self, index: int) -> Interval:
        """Return the filters of y that index ``index`` computes, or of which it computes a partial sum.

        Parameters
        ----------
        index : int
            Coordinate along the axis ``c``.

        Returns
        -------
        Interval
        """
        return _block(self.filters, self.parts // self.blocks, index // self.blocks)

    @property
    def local_groups(self) -> int:
        """Groups of the convolution that one index computes."""
        return max(1, self.groups // self.parts) if self.groups > 1 else 1

    def weight_layout(self, grid: ProcessGrid, shape: Sequence[int], *, transposed: bool = False) -> Distribution:
        """Return the distribution of the weight.

        Parameters
        ----------
        grid : ProcessGrid
            The grid of the layer. Collective at its first use for this split.
        shape : sequence of int
            Shape of the weight: (F, C / groups, ...), or (C, F / groups, ...) if transposed.
        transposed : bool
            The layer is a transposed convolution. Otherwise it is a convolution or a linear layer.

        Returns
        -------
        Distribution
            Over a factored grid (:meth:`ProcessGrid.factored`).
        """
        if self.groups == 1:
            first, second = self.parts // self.blocks, self.blocks
        # Fewer groups than ranks: the ranks of a group share its channels and divide its filters.
        elif transposed and self.groups < self.parts:
            first, second = self.groups, self.parts // self.groups
        else:
            first, second = self.parts, 1
        # A transposed convolution has its channels in the first dimension of the weight, and its filters in the second.
        dims = ("c", "w") if transposed and self.groups == 1 else ("w", "c")
        return Distribution(grid.factored(first, second), (*dims, *(None,) * (len(shape) - 2)))


def groups_divide(groups: int, filters: int, parts: int) -> bool:
    """Return True if F filters in groups can be split over ``parts`` indices, each with the channels of its groups.

    Parameters
    ----------
    groups : int
        Number of groups of the convolution.
    filters : int
        Number of filters F.
    parts : int
        Number of ranks along the axis ``c``.

    Returns
    -------
    bool

    Examples
    --------
    >>> groups_divide(4, 8, 2), groups_divide(2, 8, 4), groups_divide(3, 6, 2)
    (True, True, False)
    """
    return groups == 1 or groups % parts == 0 or (parts % groups == 0 and filters % parts == 0)


def _block(extent: int, parts: int, index: int) -> Interval:
    indices = block_range(extent, parts, index)
    return Interval(indices.start, indices.stop)


@lru_cache(maxsize=1024)
def channel_split(
    channels: int, filters: int, groups: int, parts: int, stride: tuple[int, ...] = (), *, transposed: bool = False
) -> ChannelSplit:
    """Return the split that communicates least.

    An index receives C (1/b - 1/p) values for each position of x, and F (b/p - 1/p) for each position of y.

    Parameters
    ----------
    channels, filters, groups, parts : int
        As in :class:`ChannelSplit`.
    stride : tuple of int
        Stride of the convolution; empty for a linear layer.
    transposed : bool
        The convolution is transposed. Otherwise it is not.

    Returns
    -------
    ChannelSplit

    Raises
    ------
    ShapeError
        If groups do not divide evenly over the ranks.

    Examples
    --------
    >>> channel_split(64, 64, 1, 4).blocks, channel_split(64, 64, 1, 4, (4, 4)).blocks
    (2, 4)
    """
    steps = math.prod(stride)
    shrinkage = 1 / steps if transposed else float(steps)  # positions of x per position of y

    def volume(blocks: int) -> float:
        # What a rank receives of x, plus what it sends of its partial sum of y, for each position of y.
        return channels * shrinkage * (1 / blocks - 1 / parts) + filters * (blocks - 1) / parts

    choices = divisors(parts) if groups == 1 else [1]
    # Of equal volumes the first one, on every rank: the one with the fewest channel blocks.
    return ChannelSplit(channels, filters, groups, parts, min(choices, key=volume))


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order.

    Parameters
    ----------
    number : int
        Positive integer.

    Returns
    -------
    list of int

    Examples
    --------
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
