"""Nearest points, and points within a radius, in point sets that are split over ranks.

Each rank gathers the coordinates of all points, and compares them with its own queries in chunks. Among points at the
same distance those with lower indices come first, so the result does not depend on the number of ranks. The distances
are computed again for the neighbours alone, and are differentiable in points and queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from distconv.distribution import Distribution
from distconv.errors import ShapeError
from distconv.layers.common.alignment import as_distributed, first_grid, replicate_parameter
from distconv.tensor import DistTensor

CHUNK_DISTANCES = 1 << 22
"""Largest number of distances that are in memory at once, unless a single query has more."""


class Neighbours(NamedTuple):
    """Neighbours of each of Q queries; k slots for each."""

    indices: torch.Tensor
    """Rows of the points, int64 (Q, k); -1 in empty slots."""
    distances: torch.Tensor
    """Euclidean distances (Q, k), ascending; infinity in empty slots."""


class NeighbourPairs(NamedTuple):
    """All P pairs of a query and a neighbour, sorted by query, then by point."""

    queries: torch.Tensor
    """Rows of the queries, int64 (P,)."""
    indices: torch.Tensor
    """Rows of the points, int64 (P,)."""
    distances: torch.Tensor
    """Euclidean distances (P,)."""


def knn(points: torch.Tensor, queries: torch.Tensor, k: int) -> Neighbours:
    """Return the k nearest points of each query.

    Distances are differentiable in points and queries; their gradient at 0 is 0. Collective for DistTensors: call on
    every rank.

    Parameters
    ----------
    points : Tensor or DistTensor
        (N, D), split over ranks in any blocks.
    queries : Tensor or DistTensor
        (Q, D), split over ranks in any blocks. Next to a DistTensor a plain tensor is identical on all ranks.
    k : int
        Number of neighbours of each query, at most N.

    Returns
    -------
    Neighbours
        Split over ranks as the queries. Indices are rows of the global tensor of points. Of points at the same distance
        those with lower indices come first.

    Raises
    ------
    ShapeError
        If the shapes do not fit, or there are fewer than k points.
    """
    _check("knn", points, queries)
    if not 1 <= k <= len(points):
        raise ShapeError(f"knn: k={k} neighbours of {len(points)} points. Pass a k from 1 to the number of points.")
    search = _NeighbourSearch(points, queries)
    indices = search.by_chunk(lambda distances: _nearest(distances, k), (k,))
    return Neighbours(search.wrap(indices), search.wrap(search.distances(indices)))


def radius_search(points: torch.Tensor, queries: torch.Tensor, radius: float, max_points: int) -> Neighbours:
    """Return the nearest points within a radius of each query, up to a number of them.

    Distances are differentiable as in ``knn``. Collective for DistTensors: call on every rank.

    Parameters
    ----------
    points, queries : Tensor or DistTensor
        As in ``knn``.
    radius : float
        Largest distance.
    max_points : int
        Number of slots for each query.

    Returns
    -------
    Neighbours
        As of ``knn``, with empty slots where there are fewer points.

    Raises
    ------
    ShapeError
        If the shapes do not fit, or ``max_points`` is not positive.
    """
    _check("radius_search", points, queries)
    if max_points < 1:
        raise ShapeError(f"radius_search: max_points={max_points}. Pass a positive number.")
    found = min(max_points, len(points))

    def within(distances: torch.Tensor) -> torch.Tensor:
        nearest = _nearest(distances, found)
        nearest = nearest.where(distances.gather(1, nearest) <= radius**2, -1)
        return torch.nn.functional.pad(nearest, (0, max_points - found), value=-1)

    search = _NeighbourSearch(points, queries)
    indices = search.by_chunk(within, (max_points,))
    return Neighbours(search.wrap(indices), search.wrap(search.distances(indices)))


def radius_pairs(points: torch.Tensor, queries: torch.Tensor, radius: float) -> NeighbourPairs:
    """Return all pairs of a query and a point within a radius.

    Distances are differentiable as in ``knn``. Collective for DistTensors: call on every rank.

    Parameters
    ----------
    points, queries : Tensor or DistTensor
        As in ``knn``.
    radius : float
        Largest distance.

    Returns
    -------
    NeighbourPairs
        Each pair is on the ranks of its query, and has the rows of the global tensors.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    """
    _check("radius_pairs", points, queries)
    search = _NeighbourSearch(points, queries)
    counts = search.by_chunk(lambda distances: (distances <= radius**2).sum(1, keepdim=True), (1,))[:, 0]
    indices = torch.cat(
        [torch.empty(0, dtype=torch.long, device=queries.device)]
        + [(distances <= radius**2).nonzero()[:, 1] for distances in search.chunks()]
    )
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    distances = _distance(search.queries[rows], search.points[indices])
    return NeighbourPairs(*(search.wrap_pairs(each) for each in (rows + search.first, indices, distances)))


class _NeighbourSearch:
    """All points and this rank's queries.

    Collective: create it on every rank.
    """

    def __init__(self, points: torch.Tensor, queries: torch.Tensor) -> None:
        self.dist: Distribution[Any] | None = None
        self.points, self.queries, self.first, self.count = points, queries, 0, len(queries)
        if isinstance(points, DistTensor) or isinstance(queries, DistTensor):
            split = as_distributed(queries, first_grid(queries, points))
            # Rows stay where they are; each rank needs all coordinates of a row.
            self.dist = split.dist.with_axes((split.dist.axes[0], None))
            split = split.redistribute(self.dist)
            self.points = replicate_parameter(points, self.dist)
            self.queries, self.first = split.local, self.dist.box(None, split.shape)[0].start

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the squared distances (q, N) of a few queries after others."""
        with torch.no_grad():
            for part in self.queries.split(max(1, CHUNK_DISTANCES // max(1, len(self.points)))):
                squares = _squared_distance(part[:, None], self.points[None])
                # Points that are not finite are neighbours only if there are no others.
                yield squares.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def by_chunk(self, find: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the results of ``find`` for all of this rank's queries, integers (Q, *shape)."""
        none = torch.empty(0, *shape, dtype=torch.long, device=self.queries.device)
        return torch.cat([none, *(find(distances) for distances in self.chunks())])

    def distances(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the distances (Q, k) of neighbours (Q, k); infinity for an index of -1."""
        if not len(self.points):
            return self.queries.new_full(indices.shape, torch.inf)
        return _distance(self.queries[:, None], self.points[indices.clamp(min=0)]).where(indices >= 0, torch.inf)

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Return values (Q, k) of all queries, given those of this rank's."""
        return local if self.dist is None else DistTensor(local, self.dist, (self.count, local.shape[1]))

    def wrap_pairs(self, local: torch.Tensor) -> torch.Tensor:
        """Return values (P,) of all pairs, given those of this rank's queries. Collective."""
        if self.dist is None:
            return local
        grid, axis = self.dist.grid, self.dist.split[0]
        if axis is None:
            return DistTensor(local, Distribution(grid, (None,)), (len(local),))
        # Ranks with the same queries have the same pairs.
        counts = dict(grid.world.allgather((grid.coords[axis], len(local))))
        ends = [0]
        for part in range(grid.shape[axis]):
            ends.append(ends[-1] + counts[part])
        return DistTensor(local, Distribution(grid, (axis,), boundaries={axis: ends}), (ends[-1],))


def _check(call: str, points: torch.Tensor, queries: torch.Tensor) -> None:
    if points.ndim != 2 or queries.ndim != 2 or points.shape[1] != queries.shape[1] or points.dtype != queries.dtype:
        raise ShapeError(
            f"{call}: points are {points.dtype} of shape {tuple(points.shape)} and queries {queries.dtype} of shape "
            f"{tuple(queries.shape)}. Pass (N, D) and (Q, D) of one dtype."
        )


def _squared_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the squared distances of points in the last dimension.

    Summed by explicit operations in one order: a reduction may round differently for other sizes, so ties would be
    broken differently on other numbers of ranks.
    """
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
        total = total + (x - y) * (x - y)
    return total


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the distances of points in the last dimension; the gradient at 0 is 0, not that of a square root."""
    squares = _squared_distance(a, b)
    apart = squares > 0
    return squares.where(apart, 1).sqrt().where(apart, 0)


def _nearest(distances: torch.Tensor, k: int) -> torch.Tensor:
    """Return the columns (Q, k) of the k smallest distances (Q, N) of each row; of equal ones the first."""
    if not k:
        return distances.new_empty(len(distances), 0, dtype=torch.long)
    limit = distances.kthvalue(k, dim=1, keepdim=True).values
    closer, tied = distances < limit, distances == limit
    chosen = closer | (tied & (tied.cumsum(1) <= k - closer.sum(1, keepdim=True)))
    columns = chosen.nonzero()[:, 1].view(-1, k)
    order = distances.gather(1, columns).argsort(dim=1, stable=True)
    return columns.gather(1, order)
