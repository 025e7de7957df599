"""Seconds that collective communication takes: of several algorithms, the one that is cheapest for the size.

The model has alpha (seconds per message), beta (seconds per byte sent) and gamma (seconds per byte added to another).
p is the number of ranks, n the number of bytes.

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Dryden et al.
2019, II-B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distconv.perfmodel.machine.links import Group, Link

if TYPE_CHECKING:
    from distconv.perfmodel.machine.machine import Machine

SUM_PASSES = 3
"""Bytes that memory moves per byte of a sum: two are read and one is written."""

_COPY_PASSES = 2


@dataclass(frozen=True)
class Level:
    """``ranks`` ranks, any two of which are joined by ``link``; ``gamma`` in seconds per byte that a rank sums up."""

    ranks: int
    link: Link
    gamma: float

    def steps(self, messages: float, nbytes: float, summed: float = 0.0) -> float:
        """Seconds for a rank that sends ``messages``, of ``nbytes`` bytes in all, and sums up ``summed`` bytes."""
        return messages * self.link.collective_s + nbytes / self.link.bandwidth_bytes_per_s + summed * self.gamma

    @property
    def power(self) -> int:
        """Logarithm of the largest power of two that is not above p."""
        return self.ranks.bit_length() - 1

    @property
    def is_power(self) -> bool:
        """Whether p is a power of two."""
        return self.ranks == 1 << self.power

    @property
    def others(self) -> float:
        """(p - 1) / p: the share of the bytes that is another rank's."""
        return (self.ranks - 1) / self.ranks


Algorithm = Callable[[Level, float], float]


def _folded(algorithm: Algorithm) -> Algorithm:
    """``algorithm`` for any p: ranks above a power of two hand in all they have first and receive all last."""

    def any_ranks(level: Level, n: float) -> float:
        if level.is_power:
            return algorithm(level, n)
        return algorithm(Level(1 << level.power, level.link, level.gamma), n) + level.steps(2, 2 * n, n)

    return any_ranks


# -- allreduce: n bytes on each rank before and after -----------------------------------------------------------------


@_folded
def allreduce_recursive_doubling(level: Level, n: float) -> float:
    """Everything is exchanged with a partner lg p times: the fewest messages."""
    return level.steps(level.power, level.power * n, level.power * n)


@_folded
def allreduce_rabenseifner(level: Level, n: float) -> float:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling."""
    return level.steps(2 * level.power, 2 * level.others * n, level.others * n)


def allreduce_ring(level: Level, n: float) -> float:
    """Reduce-scatter and allgather around a ring: the fewest bytes for any p."""
    return level.steps(2 * (level.ranks - 1), 2 * level.others * n, level.others * n)


# -- allgather: n bytes on each rank afterwards, n / p before ---------------------------------------------------------


def allgather_doubling(level: Level, n: float) -> float:
    """Recursive doubling; Bruck's algorithm where p is no power of two, which has to put the blocks in order."""
    if level.is_power:
        return level.steps(level.power, level.others * n)
    return level.steps(level.power + 1, level.others * n, n)


def allgather_ring(level: Level, n: float) -> float:
    """Blocks travel around a ring, straight to their places."""
    return level.steps(level.ranks - 1, level.others * n)


# -- reduce-scatter: n bytes on each rank before, n / p afterwards ----------------------------------------------------


def reduce_scatter_halving(level: Level, n: float) -> float:
    """Recursive halving; ranks above a power of two hand in all they have first and receive their block last."""
    if level.is_power:
        return level.steps(level.power, level.others * n, level.others * n)
    return level.steps(level.power + 2, 2 * n, (1 + level.others) * n)


def reduce_scatter_pairwise(level: Level, n: float) -> float:
    """Each rank sends each other one its block."""
    return level.steps(level.ranks - 1, level.others * n, level.others * n)


# -- the cheapest, over one kind of link and over two -----------------------------------------------------------------


def _cheapest(*algorithms: Algorithm) -> Algorithm:
    def chosen(level: Level, n: float) -> float:
        return min(algorithm(level, n) for algorithm in algorithms) if level.ranks > 1 and n else 0.0

    return chosen


flat_allreduce = _cheapest(allreduce_recursive_doubling, allreduce_rabenseifner, allreduce_ring)
flat_allgather = _cheapest(allgather_doubling, allgather_ring)
flat_reduce_scatter = _cheapest(reduce_scatter_halving, reduce_scatter_pairwise)


@dataclass(frozen=True)
class Levels:
    """The ranks of a group on several nodes, seen in two ways: all alike, or those of a node apart from the others.

    ``flat`` has all ranks on the link between nodes (that of the node, if there is but one), ``node`` the ranks of one
    node, ``across`` one rank of each node: as many such sets as there are ranks on a node work side by side.
    """

    flat: Level
    node: Level
    across: Level

    @property
    def nested(self) -> bool:
        """Whether there are two kinds of links to choose between."""
        return self.node.ranks > 1 and self.across.ranks > 1


def allreduce(levels: Levels, n: float) -> float:
    """Flat, or: reduce-scatter on the node, allreduce of each part between nodes, allgather on the node."""
    flat = flat_allreduce(levels.flat, n)
    if not levels.nested:
        return flat
    between = flat_allreduce(levels.across, n / levels.node.ranks)
    return min(flat, flat_reduce_scatter(levels.node, n) + between + flat_allgather(levels.node, n))


def allgather(levels: Levels, n: float) -> float:
    """Flat, or: allgather of each part between nodes, then of all on the node. ``n`` is gathered in all."""
    flat = flat_allgather(levels.flat, n)
    if not levels.nested:
        return flat
    return min(flat, flat_allgather(levels.across, n / levels.node.ranks) + flat_allgather(levels.node, n))


def messages(levels: Levels, peers: int, nbytes: float) -> float:
    """Seconds to send each of ``peers`` other ranks ``nbytes``, to as many as there are on the own node."""
    near = min(peers, levels.node.ranks - 1)
    far = peers - near
    return near * levels.node.link.send(nbytes) + far * levels.flat.link.send(nbytes)


# -- products of distributed matrices ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmTime:
    """Seconds of communication of a layer whose channels are split, forward (x, y) and backward (dL/dy, dL/dx)."""

    gather_x: float
    sum_y: float
    gather_dy: float
    sum_dx: float


def distributed_gemm(machine: Machine, group: Group, blocks: int, x_bytes: float, y_bytes: float) -> GemmTime:
    """Communication of y = x W^T with x and y split over their features (channels) among ``group``, and W in place.

    ``x_bytes`` and ``y_bytes`` are the blocks that a rank owns; the channels of x are in ``blocks`` blocks. As
    the layers run it: index i gathers the features of x that its weights meet, and sends its shares of y to their
    owners; backward gathers dL/dy and sums shares of dL/dx, and dL/dW needs nothing more. One block of x is
    gather-x, p blocks are reduce-y, what lies between is two-dimensional. All are direct messages of a block. As
    features are not contiguous, messages are packed and unpacked, which counts.

    Source: Schatz, van de Geijn, Poulson 2016, the algorithms whose second operand is stationary; Dryden et al. 2019,
    II-B, III-D and V-B.
    """
    levels, parts = machine.levels(group), group.ranks
    roofline = machine.computing(levels.node.ranks).roofline
    # In the two-dimensional splits some index owns nothing of what it needs of x; all own a part of the y they compute.
    x_peers = {1: parts - 1, parts: 0}.get(blocks, parts // blocks)
    y_peers = blocks - 1

    def moved(peers: int, nbytes: float, passes: int) -> float:
        """Packed (read and written), sent, and brought to its place with the own part in ``passes`` over memory."""
        packing, placing = 2.0 * peers * nbytes, float(passes * (peers + 1) * nbytes)
        local = roofline.time(0.0, packing, math.inf) + roofline.time(0.0, placing, math.inf) if peers else 0.0
        return messages(levels, peers, nbytes) + local

    return GemmTime(
        moved(x_peers, x_bytes, _COPY_PASSES),
        moved(y_peers, y_bytes, SUM_PASSES),
        moved(y_peers, y_bytes, _COPY_PASSES),
        moved(x_peers, x_bytes, SUM_PASSES),
    )
