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
"""Steps from an output site to its input sites: D integers for each position of a kernel."""

Stride = tuple[int, ...]
"""Edges of a cell along each of the D dimensions, in cells of the finest grid."""


def stride_per_dim(stride: int | Sequence[int], dimension: int) -> Stride:
    """Return a stride for each dimension.

    Parameters
    ----------
    stride : int or sequence of int
        One number for all dimensions, or one for each.
    dimension : int
        Number of spatial dimensions.

    Returns
    -------
    tuple of int

    Raises
    ------
    CoordinateError
        If ``stride`` is not a positive integer, or one for each dimension.
    """
    strides = (stride,) * dimension if isinstance(stride, int) else tuple(stride)
    if len(strides) != dimension or not all(isinstance(s, int) and s > 0 for s in strides):
        raise CoordinateError(f"stride={stride}: pass a positive integer, or one for each of {dimension} dimensions")
    return strides


@dataclass(frozen=True)
class KeySpace:
    """A box of samples and space, whose cells have keys: their numbers in lexicographic order.

    >>> space = KeySpace((0, -2, 0), (1, 5, 10))
    >>> space.pack(torch.tensor([[0, -2, 0], [0, 1, 7]])), space.step((1, -1))
    (tensor([ 0, 37]), 9)
    """

    lower: tuple[int, ...]
    """Smallest batch index, then smallest coordinate of each dimension."""
    extents: tuple[int, ...]
    """Size of the box in the same order."""

    @classmethod
    def enclose(cls, *sets: torch.Tensor, margin: Sequence[int]) -> KeySpace:
        """Return the box of all coordinates, with a margin.

        Parameters
        ----------
        *sets : Tensor
            Coordinates (N, 1 + D).
        margin : sequence of int
            Additional cells on both sides of each of the D dimensions.

        Returns
        -------
        KeySpace
            The box.

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
        # Python integers, which do not overflow.
        if math.prod(extents) >= 1 << 63:
            raise CoordinateError(
                f"coordinates span {' x '.join(map(str, extents))} cells (samples, then each dimension), more than the "
                "2^63 that an int64 can number: move the samples near the origin, or voxelise more coarsely"
            )
        return cls(tuple(lower), tuple(extents))

    @property
    def strides(self) -> tuple[int, ...]:
        """Difference of keys for a step along the batch, and along each dimension."""
        return tuple(math.prod(self.extents[d + 1 :]) for d in range(len(self.extents)))

    def pack(self, coords: torch.Tensor) -> torch.Tensor:
        """Return the keys (N,) of ``coords`` (N, 1 + D), which are within the box."""
        # Horner's rule; in place but for the first step, whose result is new.
        keys = coords[:, 0] - self.lower[0]
        for d in range(1, len(self.extents)):
            keys = keys.mul_(self.extents[d]).add_(coords[:, d] - self.lower[d])
        return keys

    def unpack(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the coordinates (N, 1 + D) of ``keys`` (N,)."""
        columns = []
        for low, extent in zip(self.lower[::-1], self.extents[::-1], strict=True):
            # The last dimension varies fastest. Division rounds down.
            columns.append(keys % extent + low)
            keys = keys // extent
        return torch.stack(columns[::-1], 1)

    def step(self, offset: Sequence[int]) -> int:
        """Return the difference of keys for a step by ``offset`` (D,) that does not leave the box."""
        return sum(o * stride for o, stride in zip(offset, self.strides[1:], strict=True))


def check_coordinates(
    coords: torch.Tensor, stride: int | Sequence[int] = 1, batch_size: int | None = None
) -> torch.Tensor:
    """Check coordinates and return them as int64. Duplicates are found by :func:`sorting_order`.

    Parameters
    ----------
    coords : Tensor
        Shape (N, 1 + D), of any integer dtype.
    stride : int or sequence of int
        Spatial coordinates must be multiples of it: one number, or one for each dimension.
    batch_size : int, optional
        Batch indices must be smaller.

    Returns
    -------
    Tensor
        int64, shape (N, 1 + D).

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
        _raise_if_any(coords, wrong, "are not a number")
        raise CoordinateError(f"coordinates are {coords.dtype}, not integers: voxelise them first (points // size)")
    coords = coords.long()
    _raise_if_any(coords, coords[:, 0] < 0, "have a negative batch index")
    if batch_size is not None:
        _raise_if_any(coords, coords[:, 0] >= batch_size, f"have a batch index beyond batch_size={batch_size}")
    if any(s > 1 for s in stride_per_dim(stride, coords.shape[1] - 1)):
        _raise_if_any(coords, ~are_multiples(coords, stride), f"are no multiples of the stride {stride}")
    return coords


def are_multiples(coords: torch.Tensor, stride: int | Sequence[int]) -> torch.Tensor:
    """Return True for each row whose spatial coordinates are multiples of a stride.

    Parameters
    ----------
    coords : Tensor
        Shape (N, 1 + D).
    stride : int or sequence of int
        One number, or one for each dimension.

    Returns
    -------
    Tensor
        Booleans (N,).
    """
    return (coords[:, 1:] % torch.tensor(stride, device=coords.device) == 0).all(1)


def is_in_volume(coords: torch.Tensor, shape: Sequence[int], stride: int | Sequence[int]) -> torch.Tensor:
    """Return True for each row that lies in a volume, which begins at coordinate 0.

    Parameters
    ----------
    coords : Tensor
        Shape (N, 1 + D).
    shape : sequence of int
        Number of cells along each dimension.
    stride : int or sequence of int
        Edge of a cell: one number, or one for each dimension.

    Returns
    -------
    Tensor
        Booleans (N,).
    """
    ends = torch.tensor(tuple(shape), device=coords.device) * torch.tensor(stride, device=coords.device)
    return ((coords[:, 1:] >= 0) & (coords[:, 1:] < ends)).all(1)


def sorting_order(coords: torch.Tensor) -> torch.Tensor:
    """Return the order (N,) of the rows that sorts ``coords`` (N, 1 + D) lexicographically.

    Raises
    ------
    CoordinateError
        If a row occurs twice, or the rows span too many cells.
    """
    keys, order = torch.sort(KeySpace.enclose(coords, margin=(0,) * (coords.shape[1] - 1)).pack(coords))
    if len(keys):
        # Equal rows are neighbours after sorting.
        repeated = torch.cat([keys.new_zeros(1, dtype=torch.bool), keys[1:] == keys[:-1]])
        _raise_if_any(coords[order], repeated, "repeat another row; merge their features (say their mean) first")
    return order


def coarsen(coords: torch.Tensor, stride: int | Sequence[int]) -> torch.Tensor:
    """Return the cells of a coarser grid that hold sites.

    Parameters
    ----------
    coords : Tensor
        Shape (N, 1 + D).
    stride : int or sequence of int
        Size of the coarser cells: one number, or one for each dimension.

    Returns
    -------
    Tensor
        The lower corners of the cells (M, 1 + D), sorted.
    """
    # torch's % has the sign of the divisor, so negative coordinates are rounded down, too.
    steps = torch.tensor(stride, device=coords.device)
    corners = torch.cat([coords[:, :1], coords[:, 1:] - coords[:, 1:] % steps], 1)
    return unique_rows(corners)


def reachable_sites(coords: torch.Tensor, offsets: Offsets, unit: int | Sequence[int] = 1) -> torch.Tensor:
    """Return the sites that lie at an offset from a site.

    Parameters
    ----------
    coords : Tensor
        Shape (N, 1 + D).
    offsets : Offsets
        The offsets.
    unit : int or sequence of int
        Number of cells of a step: one number, or one for each dimension.

    Returns
    -------
    Tensor
        Shape (M, 1 + D), sorted.
    """
    steps = torch.tensor(offsets, device=coords.device).reshape(len(offsets), 1, coords.shape[1] - 1)
    steps = steps * torch.tensor(unit, device=coords.device)
    # A copy for each offset: expand() alone would add all steps to the same memory.
    sites = coords.expand(len(offsets), *coords.shape).clone()
    sites[..., 1:] += steps
    return unique_rows(sites.flatten(0, 1))


def unique_rows(coords: torch.Tensor) -> torch.Tensor:
    """Return each row of ``coords`` (N, 1 + D) once, sorted."""
    space = KeySpace.enclose(coords, margin=(0,) * (coords.shape[1] - 1))
    return space.unpack(space.pack(coords).unique())


def _raise_if_any(coords: torch.Tensor, wrong: torch.Tensor, what: str) -> None:
    """Raise CoordinateError if any row is ``wrong``, with their number and the first one."""
    if count := int(wrong.sum()):
        first = coords[wrong][0].tolist()
        raise CoordinateError(f"{count} of {len(wrong)} coordinates {what}; the first is {first} (sample first)")
