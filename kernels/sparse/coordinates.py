"""Coordinates of sites: checks, integer keys that sort like them, coarser and wider sets of sites.

Coordinates are integers (N, 1 + D), the index of the sample in the batch first, and may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distconv.errors import CoordinateError

MAX_DIMENSION = 4

Offsets = tuple[tuple[int, ...], ...]
"""Steps from an output site to its input sites, one of D integers for each position of a kernel."""


@dataclass(frozen=True)
class KeySpace:
    """A box of samples and space whose cells are numbered in lexicographic order: their keys.

    ``lower`` and ``extents`` are those of the batch index, then of each dimension.

    >>> space = KeySpace((0, -2, 0), (1, 5, 10))
    >>> space.pack(torch.tensor([[0, -2, 0], [0, 1, 7]])), space.step((1, -1))
    (tensor([ 0, 37]), 9)
    """

    lower: tuple[int, ...]
    extents: tuple[int, ...]

    @classmethod
    def enclose(cls, *sets: torch.Tensor, margin: Sequence[int]) -> KeySpace:
        """The box that holds ``sets`` of coordinates and ``margin`` cells more on both sides of each dimension.

        Raises
        ------
        CoordinateError
            If the box has more cells than an int64 can number.
        """
        occupied = [coords for coords in sets if len(coords)]
        if not occupied:
            return cls((0,) * (1 + len(margin)), (1,) * (1 + len(margin)))
        lowest = zip(*(coords.amin(0).tolist() for coords in occupied), strict=True)
        highest = zip(*(coords.amax(0).tolist() for coords in occupied), strict=True)
        lower = [min(each) - m for each, m in zip(lowest, (0, *margin), strict=True)]
        extents = [max(each) + m + 1 - low for each, m, low in zip(highest, (0, *margin), lower, strict=True)]
        if math.prod(extents) >= 1 << 63:
            raise CoordinateError(
                f"coordinates span {' x '.join(map(str, extents))} cells (samples, then each dimension), more than the "
                "2^63 that an int64 can number: move the samples near the origin, or voxelise more coarsely"
            )
        return cls(tuple(lower), tuple(extents))

    @property
    def strides(self) -> tuple[int, ...]:
        """What one step along the batch and each dimension adds to a key."""
        return tuple(math.prod(self.extents[d + 1 :]) for d in range(len(self.extents)))

    def pack(self, coords: torch.Tensor) -> torch.Tensor:
        """Keys (N,) of ``coords`` (N, 1 + D) within the box."""
        # Horner's rule; in place but for the first step, whose result is new.
        keys = coords[:, 0] - self.lower[0]
        for d in range(1, len(self.extents)):
            keys = keys.mul_(self.extents[d]).add_(coords[:, d] - self.lower[d])
        return keys

    def unpack(self, keys: torch.Tensor) -> torch.Tensor:
        """The coordinates (N, 1 + D) that have these keys."""
        columns = []
        for low, extent in zip(self.lower[::-1], self.extents[::-1], strict=True):
            columns.append(keys % extent + low)
            keys = keys // extent
        return torch.stack(columns[::-1], 1)

    def step(self, offset: Sequence[int]) -> int:
        """What a step by ``offset`` (D,) adds to a key, as long as it does not leave the box."""
        return sum(o * stride for o, stride in zip(offset, self.strides[1:], strict=True))


def check_coordinates(coords: torch.Tensor, stride: int = 1, batch_size: int | None = None) -> torch.Tensor:
    """``coords`` as int64, after a look at their shape, dtype, batch indices, and the multiples of ``stride``.

    Duplicates are found where the rows are sorted: :func:`sorted_rows`.

    Raises
    ------
    CoordinateError
        With the number of wrong rows and the first of them.
    """
    if coords.ndim != 2 or not 2 <= coords.shape[1] <= 1 + MAX_DIMENSION:
        raise CoordinateError(
            f"coordinates have shape {tuple(coords.shape)}; they must be (N, 1 + D) with 1 <= D <= {MAX_DIMENSION}, "
            "the index of the sample first"
        )
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        wrong = coords.isnan().any(1) if coords.is_floating_point() else torch.zeros(len(coords), dtype=torch.bool)
        _refuse(coords, wrong, "are not a number")
        raise CoordinateError(f"coordinates are {coords.dtype}, not integers: voxelise them first (points // size)")
    coords = coords.long()
    _refuse(coords, coords[:, 0] < 0, "have a negative batch index")
    if batch_size is not None:
        _refuse(coords, coords[:, 0] >= batch_size, f"have a batch index beyond batch_size={batch_size}")
    if stride > 1:
        _refuse(coords, (coords[:, 1:] % stride != 0).any(1), f"are no multiples of the stride {stride}")
    return coords


def sorting_order(coords: torch.Tensor) -> torch.Tensor:
    """The order (N,) of the rows that sorts ``coords`` lexicographically.

    Raises
    ------
    CoordinateError
        If a row occurs twice, or the rows span too much to be numbered.
    """
    keys, order = torch.sort(KeySpace.enclose(coords, margin=(0,) * (coords.shape[1] - 1)).pack(coords))
    if len(keys):
        repeated = keys[1:] == keys[:-1]
        _refuse(coords[order[1:]], repeated, "repeat another row; merge their features (say their mean) first")
    return order


def coarsen(coords: torch.Tensor, stride: int) -> torch.Tensor:
    """The cells of a grid of ``stride`` that hold sites of ``coords``: their lower corners, sorted."""
    corners = torch.cat([coords[:, :1], coords[:, 1:] - coords[:, 1:] % stride], 1)
    return unique_rows(corners)


def reachable_sites(coords: torch.Tensor, offsets: Offsets, unit: int = 1) -> torch.Tensor:
    """The sites that lie at one of ``offsets``, in steps of ``unit`` cells, from a site of ``coords``; sorted."""
    steps = torch.tensor(offsets, device=coords.device).reshape(len(offsets), 1, coords.shape[1] - 1) * unit
    sites = coords.expand(len(offsets), *coords.shape).clone()
    sites[..., 1:] += steps
    return unique_rows(sites.flatten(0, 1))


def unique_rows(coords: torch.Tensor) -> torch.Tensor:
    """Each row of ``coords`` once, sorted."""
    space = KeySpace.enclose(coords, margin=(0,) * (coords.shape[1] - 1))
    return space.unpack(space.pack(coords).unique())


def _refuse(coords: torch.Tensor, wrong: torch.Tensor, what: str) -> None:
    """Raise if any row is ``wrong``."""
    if count := int(wrong.sum()):
        first = coords[wrong][0].tolist()
        raise CoordinateError(f"{count} of {len(wrong)} coordinates {what}; the first is {first} (sample first)")
