"""Which rank has which channels and filters of a layer whose C channels and F filters grid axis ``c`` splits.

Activations are split over their channels in p balanced blocks. Index i along the axis holds the weights from channel
block i % b to filter block i // b, of b and p / b blocks:

    gather-x    b = 1      needs all of x; has filters F/p; what it computes of y is what it owns
    reduce-y    b = p      needs what it owns of x; computes a share of all of y, summed at the owners
    2-D         between    needs C/b channels, computes F b/p filters: neither x nor y moves whole

Weights never move. With groups, filters are split and only their own groups' channels are needed. Pure arithmetic;
``layers.plumbing.sharded_weights`` has what operators do with it.

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
    """The grid axis of each dimension of what goes into and comes out of a linear layer.

    Samples come first and features last; whatever lies between is not split.

    >>> linear_axes(3)
    ('n', None, 'c')
    """
    return ("n", *(None,) * (ndim - 2), AXIS)[:ndim]


@dataclass(frozen=True)
class ChannelSplit:
    """C channels and F filters in ``groups`` groups over ``parts`` indices, channels in ``blocks`` blocks.

    Raises
    ------
    ShapeError
        If there are groups that do not divide evenly.
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

    def needed(self, index: int) -> Interval:
        """Channels of x that ``index`` computes from."""
        if self.groups == 1:
            return _block(self.channels, self.blocks, index % self.blocks)
        filters, per_group = self.computed(index), self.filters // self.groups
        first, last = filters.start // per_group, -(-filters.stop // per_group)
        return Interval(first * self.channels // self.groups, last * self.channels // self.groups)

    def computed(self, index: int) -> Interval:
        """Filters of y that ``index`` computes, or computes a share of."""
        return _block(self.filters, self.parts // self.blocks, index // self.blocks)

    @property
    def local_groups(self) -> int:
        """Groups of the convolution that one index computes."""
        return max(1, self.groups // self.parts) if self.groups > 1 else 1

    def weight_layout(self, grid: ProcessGrid, shape: Sequence[int], *, transposed: bool = False) -> Distribution:
        """Which block of the weight each rank holds.

        ``shape`` is (F, C / groups, ...), or (C, F / groups, ...) of a transposed convolution.
        """
        if self.groups == 1:
            first, second = self.parts // self.blocks, self.blocks
        elif transposed and self.groups < self.parts:
            first, second = self.groups, self.parts // self.groups
        else:
            first, second = self.parts, 1
        dims = ("c", "w") if transposed and self.groups == 1 else ("w", "c")
        return Distribution(grid.factored(first, second), (*dims, *(None,) * (len(shape) - 2)))


def groups_divide(groups: int, filters: int, parts: int) -> bool:
    """Whether F filters in ``groups`` groups can be split over ``parts`` indices, each with its groups' channels.

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
    """The split that moves least, of a convolution with this ``stride`` or (without one) of a linear layer.

    An index receives C (1/b - 1/p) values of x per position of x and F (b/p - 1/p) of y per position of y.

    >>> channel_split(64, 64, 1, 4).blocks, channel_split(64, 64, 1, 4, (4, 4)).blocks
    (2, 4)
    """
    steps = math.prod(stride)
    shrinkage = 1 / steps if transposed else float(steps)  # positions of x per position of y

    def volume(blocks: int) -> float:
        return channels * shrinkage * (1 / blocks - 1 / parts) + filters * (blocks - 1) / parts

    choices = divisors(parts) if groups == 1 else [1]
    return ChannelSplit(channels, filters, groups, parts, min(choices, key=volume))


def divisors(number: int) -> list[int]:
    """Into how many equal parts ``number`` can be cut, from 1 on.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
