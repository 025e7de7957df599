"""The sites that each rank owns.

A rank owns the sites in a box of samples and space. The cuts between boxes are chosen so that all ranks have about as
many sites. Arithmetic without communication.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from distconv.arrangement import Arrangement
from distconv.distribution import Grid_co
from distconv.errors import DistributionError

Grid = TypeVar("Grid", bound=Arrangement)

UNBOUNDED = 1 << 62
"""End of the boxes at the border of space."""

COLUMNS = {1: ("n", "w"), 2: ("n", "h", "w"), 3: ("n", "d", "h", "w"), 4: ("n", None, "d", "h", "w")}
"""The grid axis that cuts samples and each dimension of space; the first of four dimensions is not cut."""

SiteBox = tuple[tuple[int, int], ...]
"""Half-open ranges of samples and of each spatial dimension, without a range of channels."""


@dataclass(frozen=True)
class Partition(Generic[Grid_co]):
    """Cuts across samples and space that give each rank a box.

    Parameters
    ----------
    grid : ProcessGrid or Arrangement
    cuts : tuple of tuple of int
        ``cuts[i]`` are the coordinates, ascending, between the parts of column i, whose number is the size of the grid
        axis in ``COLUMNS``. A coordinate equal to a cut belongs to the part after it.

    Raises
    ------
    DistributionError
        If an axis of the grid cuts nothing, or the cuts do not fit the grid.
    """

    grid: Grid_co
    cuts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        axes = COLUMNS.get(len(self.cuts) - 1, ())
        unused = [axis for axis, parts in self.grid.shape.items() if parts > 1 and axis not in axes]
        if unused:
            raise DistributionError(
                f"sites of {len(self.cuts) - 1} dimensions over {self.grid!r}: axis {unused[0]} splits none of them. "
                "Use "
                f"{', '.join(axis for axis in axes if axis)}."
            )
        for axis, cuts in zip(axes, self.cuts, strict=True):
            parts = 1 if axis is None else self.grid.shape[axis]
            if len(cuts) != parts - 1 or list(cuts) != sorted(cuts):
                raise DistributionError(
                    f"cuts {cuts} along {axis}: {parts} parts require {parts - 1} ascending coordinates"
                )

    @staticmethod
    def balanced(grid: Grid, coords: torch.Tensor) -> Partition[Grid]:
        """Return cuts that give each part of an axis about as many sites.

        The result depends on the arguments alone, so it is identical on all ranks that pass the same.

        Parameters
        ----------
        grid : ProcessGrid or Arrangement
        coords : Tensor
            Sites (N, 1 + D) of all ranks.

        Returns
        -------
        Partition
        """
        axes = COLUMNS[coords.shape[1] - 1]
        parts = [1 if axis is None else grid.shape[axis] for axis in axes]
        return Partition(grid, tuple(_quantiles(coords[:, i], count) for i, count in enumerate(parts)))

    @property
    def dimension(self) -> int:
        """Number of spatial dimensions."""
        return len(self.cuts) - 1

    @cached_property
    def _axes(self) -> tuple[str | None, ...]:
        return COLUMNS[self.dimension]

    def box(self, rank: int) -> SiteBox:
        """Return the box of a rank.

        Parameters
        ----------
        rank : int

        Returns
        -------
        SiteBox
        """
        at = self.grid.coords_of(rank)
        ends = [(-UNBOUNDED, *cuts, UNBOUNDED) for cuts in self.cuts]
        return tuple((e[at[a] if a else 0], e[at[a] + 1 if a else 1]) for e, a in zip(ends, self._axes, strict=True))

    def owners(self, coords: torch.Tensor) -> torch.Tensor:
        """Return the rank that owns each site.

        Parameters
        ----------
        coords : Tensor
            (N, 1 + D).

        Returns
        -------
        Tensor
            (N,), int64.
        """
        rank = coords.new_zeros(len(coords))
        for column, (axis, cuts) in enumerate(zip(self._axes, self.cuts, strict=True)):
            if axis is not None and cuts:
                # right=True: a coordinate equal to a cut belongs to the part after it.
                ends = torch.tensor(cuts, device=coords.device)
                rank += torch.bucketize(coords[:, column].contiguous(), ends, right=True) * self.grid.stride(axis)
        return rank

    def intersecting_ranks(self, box: SiteBox, rank: int) -> list[int]:
        """Return the ranks whose boxes intersect a box. The cost is proportional to their number.

        Parameters
        ----------
        box : SiteBox
        rank : int
            This rank is excluded from the result.

        Returns
        -------
        list of int
            Ascending.
        """
        neighbours: Iterable[tuple[int, ...]] = itertools.product(
            *(_intersecting_parts(cuts, ends) for cuts, ends in zip(self.cuts, box, strict=True))
        )
        ranks = {
            self.grid.rank_of({axis: i for axis, i in zip(self._axes, indices, strict=True) if axis})
            for indices in neighbours
        }
        return sorted(ranks - {rank})

    def others(self, box: SiteBox, rank: int) -> list[int]:
        """Return :meth:`intersecting_ranks`, of which this is the former name.

        Parameters
        ----------
        box, rank
            As in :meth:`intersecting_ranks`.

        Returns
        -------
        list of int
        """
        warnings.warn("Partition.others is now Partition.intersecting_ranks", DeprecationWarning, stacklevel=2)
        return self.intersecting_ranks(box, rank)


def grow_box(box: SiteBox, low: Sequence[int], high: Sequence[int]) -> SiteBox:
    """Return a box whose ends are moved along each spatial dimension.

    Parameters
    ----------
    box : SiteBox
    low, high : sequence of int
        Displacements of the lower and of the upper end, for each spatial dimension.

    Returns
    -------
    SiteBox
    """
    return (box[0], *((a + x, b + y) for (a, b), x, y in zip(box[1:], low, high, strict=True)))


def rows_in_box(coords: torch.Tensor, box: SiteBox) -> torch.Tensor:
    """Return the rows of the sites that lie in a box.

    Parameters
    ----------
    coords : Tensor
        (N, 1 + D).
    box : SiteBox

    Returns
    -------
    Tensor
        Row indices, int64.
    """
    inside = torch.ones(len(coords), dtype=torch.bool, device=coords.device)
    for column, (low, high) in enumerate(box):
        inside &= (coords[:, column] >= low) & (coords[:, column] < high)
    return inside.nonzero().flatten()


def _intersecting_parts(cuts: Sequence[int], ends: tuple[int, int]) -> range:
    """Return the parts that intersect the range ``ends``; for an empty range, the part that contains its position.

    So the relation is symmetric, also for empty parts: i is among the parts of part j moved by d exactly if j is among
    the parts of part i moved by -d. Senders and receivers depend on this.
    """
    first = sum(cut <= ends[0] for cut in cuts)
    last = sum(cut < ends[1] for cut in cuts)
    return range(first, last + 1)


def _quantiles(values: torch.Tensor, parts: int) -> tuple[int, ...]:
    """Return ``parts - 1`` cuts with about as many ``values`` between them."""
    if parts == 1 or not len(values):
        return (0,) * (parts - 1)
    distinct, counts = values.unique(return_counts=True)
    # A cut before each distinct value, and one after the last: sites of one coordinate cannot be divided. Of cuts that
    # are equally near to the quantile, min takes the lowest on all ranks.
    candidates = torch.cat([distinct, distinct[-1:] + 1]).tolist()
    below = [0, *counts.cumsum(0).tolist()]
    wanted = [len(values) * part / parts for part in range(1, parts)]
    return tuple(candidates[min(range(len(below)), key=lambda i: abs(below[i] - w))] for w in wanted)
