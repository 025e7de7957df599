"""Local shapes, halos, groups of ranks and redistributions. Pure arithmetic, without MPI.

A process grid is given by its parts along each axis, with ranks in the order of :class:`distconv.ProcessGrid`. Two
ranks that share a node in this model therefore share it in a run, too, if ranks are numbered node by node. The cost
model calls the functions for every candidate, so results are cached.

A halo consists of ghosts, the rows that a rank receives from its neighbours.

Source: Dryden et al. 2019, II-C (index sets), III-A (halos), III-C (redistribution).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distconv.arrangement import Arrangement
from distconv.distribution import Distribution, Indices, block_range, count_shared_elements, default_axes
from distconv.perfmodel.graph.graph import KernelWindow
from distconv.perfmodel.machine.machine import RankGroup


class AxisParts(Arrangement):
    """Process grid without communicator.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    per_node : int
        Ranks of each node.
    **axes : int
        Parts along each axis. Ranks that the axes leave over are replicas (axis ``r``).
    """

    def __init__(self, ranks: int, per_node: int, **axes: int) -> None:
        split = {axis: parts for axis, parts in axes.items() if axis != "r"}
        super().__init__(**split, r=ranks // math.prod(split.values()))
        self.ranks, self.per_node = ranks, per_node

    @staticmethod
    def from_axes(axes: Mapping[str, int], ranks: int, per_node: int) -> AxisParts:
        """Return the grid of a candidate. A value of ``r`` in ``axes`` is ignored, because it follows from ``ranks``.

        Equal arguments return the same object, so that caches find it by identity.

        Parameters
        ----------
        axes : mapping of str to int
            Number of parts along each grid axis.
        ranks : int
            Number of ranks.
        per_node : int
            Ranks of a node.

        Returns
        -------
        AxisParts
        """
        # A dict is not hashable. The order of axes is part of the key, because it determines which ranks share a node.
        return _build_parts(ranks, per_node, tuple(axes.items()))

    @cached_property
    def key(self) -> Any:
        """Parts and nodes, by which grids are compared."""
        return super().key, self.ranks, self.per_node

    def parts_along(self, axis: str | None) -> int:
        """Return the number of parts along ``axis``; 1 for None."""
        return 1 if axis is None else self.shape[axis]

    def group(self, axes: Iterable[str]) -> RankGroup:
        """Return the group of ranks that differ from rank 0 along ``axes`` alone, as a model of all such groups."""
        return _build_group(self, tuple(axes))

    def far_neighbours(self, axis: str) -> int:
        """Return how many of a rank's two neighbours along ``axis`` are on another node, for the rank with the most."""
        return _count_far_neighbours(self, axis)


@lru_cache(maxsize=4096)
def _count_far_neighbours(parts: AxisParts, axis: str) -> int:
    # Ranks are numbered node by node, so a neighbour along an axis is `stride` ranks away, on this node or another one.
    ranks, stride = np.arange(parts.ranks), parts.stride(axis)
    coordinates, node = parts.coordinate(axis, ranks), ranks // parts.per_node
    before = (coordinates > 0) & ((ranks - stride) // parts.per_node != node)
    after = (coordinates < parts.parts_along(axis) - 1) & ((ranks + stride) // parts.per_node != node)
    return int((before.astype(int) + after).max())


@lru_cache(maxsize=4096)
def _build_parts(ranks: int, per_node: int, axes: tuple[tuple[str, int], ...]) -> AxisParts:
    # One object for equal arguments: caches with it as a key find it by identity.
    return AxisParts(ranks, per_node, **dict(axes))


@lru_cache(maxsize=4096)
def _build_group(parts: AxisParts, axes: tuple[str, ...]) -> RankGroup:
    members = np.zeros(1, dtype=np.int64)
    for axis in axes:
        steps = np.arange(parts.parts_along(axis)) * parts.stride(axis)
        members = (members[:, None] + steps[None, :]).reshape(-1)
    on_node = int((members < parts.per_node).sum())
    return RankGroup(len(members), min(on_node, len(members)))


def axes_of(shape: Sequence[int]) -> tuple[str | None, ...]:
    """Return the default grid axis of each dimension of a tensor.

    Parameters
    ----------
    shape : sequence of int
        Global shape (N, C, ...).

    Returns
    -------
    tuple of str or None
        None for dimensions of size 1 and for tensors of more than five dimensions, which are replicated.
    """
    if not shape:
        return ()
    axes: tuple[str | None, ...] = default_axes(None, len(shape)) if len(shape) <= 5 else (None,) * len(shape)
    return tuple(None if extent == 1 else axis for axis, extent in zip(axes, shape, strict=True))


def local_shape(shape: Sequence[int], parts: AxisParts, axes: Sequence[str | None] | None = None) -> tuple[int, ...]:
    """Return the shape of the largest block of a tensor. The rank that owns it determines the time of all.

    Parameters
    ----------
    shape : sequence of int
        Global shape.
    parts : AxisParts
    axes : sequence of str or None, optional
        Axis of each dimension. Default: :func:`axes_of`.

    Returns
    -------
    tuple of int
    """
    return _largest_block(tuple(shape), parts, axes_of(shape) if axes is None else tuple(axes))


@lru_cache(maxsize=1 << 16)
def _largest_block(shape: tuple[int, ...], parts: AxisParts, axes: tuple[str | None, ...]) -> tuple[int, ...]:
    # Balanced blocks are sorted by length, the longest first.
    return Distribution(parts, axes).local_shape(shape, rank=0)


@lru_cache(maxsize=65536)
def widest_halo(window: KernelWindow, extent: int, out_extent: int, parts: int, dim: int) -> tuple[int, int]:
    """Return the rows that the rank with the widest halo receives, below and above its own block.

    Source: Dryden et al. 2019, III-A.

    Parameters
    ----------
    window : KernelWindow
    extent, out_extent : int
        Size of the input and of the output along the dimension.
    parts : int
        Number of blocks.
    dim : int
        Spatial dimension.

    Returns
    -------
    tuple of int
    """
    return _ghost_widths(
        window,
        extent,
        out_extent,
        parts=parts,
        dim=dim,
        index=widest_halo_index(window, extent, out_extent, parts, dim),
    )


@lru_cache(maxsize=65536)
def widest_halo_index(window: KernelWindow, extent: int, out_extent: int, parts: int, dim: int) -> int:
    """Return the first block along a spatial dimension that receives the most rows.

    Parameters
    ----------
    window, extent, out_extent, parts, dim
        As in :func:`widest_halo`.

    Returns
    -------
    int
        Block index.
    """
    return max(
        range(parts),
        key=lambda index: sum(_ghost_widths(window, extent, out_extent, parts=parts, dim=dim, index=index)),
    )


def _ghost_widths(
    window: KernelWindow, extent: int, out_extent: int, *, parts: int, dim: int, index: int
) -> tuple[int, int]:
    own, out = block_range(extent, parts, index), block_range(out_extent, parts, index)
    # Empty blocks have no halo.
    if not out or not own:
        return (0, 0)
    # Rows outside the input are padding; no rank sends them.
    start, stop = window.needed(dim, (out.start, out.stop))
    return max(0, own.start - max(start, 0)), max(0, min(stop, extent) - own.stop)


class RedistributionVolume(NamedTuple):
    """Elements and messages that the slowest rank of a redistribution receives, and the elements that it keeps.

    The slowest rank is the one with the largest ``near + FAR * far``.

    Attributes
    ----------
    near, far : int
        Elements received from the same node and from other nodes.
    near_messages, far_messages : int
        Messages that carry them.
    kept : int
        Elements that the rank owns under both distributions.
    """

    near: int
    far: int
    near_messages: int
    far_messages: int
    kept: int


NO_REDISTRIBUTION = RedistributionVolume(0, 0, 0, 0, 0)


MAX_EXAMINED_RANKS = 128
"""Ranks that are examined to find the slowest one. Of more ranks, some nodes spread evenly are examined."""

FAR = 4
"""Weight of an element from another node, relative to one from the same node, in the choice of the slowest rank."""


@lru_cache(maxsize=1 << 18)
def redistribution(shape: tuple[int, ...], source: AxisParts, target: AxisParts) -> RedistributionVolume:
    """Return the elements that the slowest rank receives when a tensor changes from one grid to another.

    A rank keeps what it owns under both distributions. It receives the rest of its new block, from a rank of its node
    where one owns it.

    Source: Dryden et al. 2019, III-C.

    Parameters
    ----------
    shape : tuple of int
        Global shape.
    source, target : AxisParts
        Grids over the same ranks.

    Returns
    -------
    RedistributionVolume
        Elements and messages.
    """
    axes = axes_of(shape)
    # Equal parts on equal ranks along the axes of this tensor: the grids may differ in other axes.
    if all(source.parts_along(a) == target.parts_along(a) and source.stride(a) == target.stride(a) for a in axes if a):
        return NO_REDISTRIBUTION
    ranks = _examined_ranks(source.ranks, source.per_node)
    new = _boxes(shape, target)
    # 1. Elements of each rank's new block that each rank of its node owns (ranks, ranks of a node).
    shares = count_shared_elements(_blocks_on_node(shape, source), new[:, :, :, None])
    own = shares[np.arange(len(ranks)), ranks % source.per_node]
    missing = np.prod(new[:, 1] - new[:, 0], axis=0) - own
    # 2. What comes from this node. Of equal blocks one is enough, and a rank does not receive what it owns.
    shares = np.where(_is_new_on_node(shape, source), shares, 0)
    near = np.minimum(shares.sum(axis=1), missing)
    # 3. The rest comes from other nodes. 4. The slowest rank.
    far = missing - near
    worst = int(np.argmax(near + FAR * far))
    # 5. Messages: all source blocks that overlap the new block; those neither on the node nor the rank's own are far.
    senders = math.prod(
        _count_overlapping_blocks(extent, source.parts_along(axis), int(start), int(stop))
        for extent, axis, (start, stop) in zip(shape, axes, new[:, :, worst], strict=True)
    )
    near_messages = int((shares[worst] > 0).sum())
    far_messages = max(1, senders - near_messages - (own[worst] > 0)) if far[worst] else 0
    return RedistributionVolume(int(near[worst]), int(far[worst]), near_messages, int(far_messages), int(own[worst]))


@lru_cache(maxsize=64)
def _examined_ranks(ranks: int, per_node: int) -> Indices:
    """Return the examined ranks: all, or all ranks of some nodes."""
    nodes = -(-ranks // per_node)
    some = np.unique(np.linspace(0, nodes - 1, max(1, min(nodes, MAX_EXAMINED_RANKS // per_node))).astype(np.int64))
    looked_at = (some[:, None] * per_node + np.arange(per_node)).reshape(-1)
    return np.asarray(looked_at[looked_at < ranks])


@lru_cache(maxsize=1 << 14)
def _boxes(shape: tuple[int, ...], parts: AxisParts) -> Indices:
    """Return start and stop of the blocks of the examined ranks: (dimensions, 2, ranks)."""
    return _boxes_of(shape, parts, _examined_ranks(parts.ranks, parts.per_node))


def _boxes_of(shape: tuple[int, ...], parts: AxisParts, ranks: Indices) -> Indices:
    boxes = np.zeros((len(shape), 2, *ranks.shape), dtype=np.int64)
    for dim, (extent, axis) in enumerate(zip(shape, axes_of(shape), strict=True)):
        edges = _edges(extent, parts.parts_along(axis))
        index = np.zeros_like(ranks) if axis is None else parts.coordinate(axis, ranks)
        boxes[dim] = edges[index], edges[index + 1]
    return boxes


@lru_cache(maxsize=1 << 14)
def _starts(extent: int, parts: int) -> tuple[int, ...]:
    """Return the start of each of ``parts`` balanced blocks."""
    return tuple(block_range(extent, parts, index).start for index in range(parts))


@lru_cache(maxsize=1 << 14)
def _edges(extent: int, parts: int) -> Indices:
    return np.array([*_starts(extent, parts), extent], dtype=np.int64)


@lru_cache(maxsize=1 << 12)
def _blocks_on_node(shape: tuple[int, ...], parts: AxisParts) -> Indices:
    """Return start and stop of the blocks on each rank's node: (dimensions, 2, ranks, ranks of a node)."""
    ranks = _examined_ranks(parts.ranks, parts.per_node)
    mates = (ranks - ranks % parts.per_node)[:, None] + np.arange(min(parts.per_node, parts.ranks))
    # The last node may have fewer ranks: its missing ones repeat the last rank, and count as copies of its block.
    return _boxes_of(shape, parts, np.asarray(np.minimum(mates, parts.ranks - 1), dtype=np.int64))


@lru_cache(maxsize=1 << 12)
def _is_new_on_node(shape: tuple[int, ...], parts: AxisParts) -> npt.NDArray[np.bool_]:
    """Return which ranks of the node own a block that neither the rank itself nor an earlier one owns."""
    held = _blocks_on_node(shape, parts)
    same = (held[..., :, None] == held[..., None, :]).all(axis=(0, 1))
    earlier = np.triu(same, 1).any(axis=1)
    ranks = _examined_ranks(parts.ranks, parts.per_node)
    return np.asarray(~(earlier | same[np.arange(len(ranks)), ranks % parts.per_node]))


def _count_overlapping_blocks(extent: int, parts: int, start: int, stop: int) -> int:
    """Return how many of ``parts`` balanced blocks overlap an interval."""
    # Blocks that start between `start` and `stop`, and the one that contains `start`.
    starts = _starts(extent, parts)
    return max(1, bisect_left(starts, stop) - bisect_right(starts, start) + 1)
