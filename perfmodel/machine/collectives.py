"""Seconds that collective communication takes: of several algorithms, the one that is cheapest for the size.

The model has alpha (seconds per message), beta (seconds per byte sent) and gamma (seconds per byte added to another).
p is the number of ranks, n the number of bytes.

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Dryden et al.
2019, II-B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distconv.perfmodel.machine.links import Link

SUM_PASSES = 3
"""Bytes that memory moves per byte of a sum: two are read and one is written."""


@dataclass(frozen=True)
class LinkLevel:
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
        """True if p is a power of two."""
        return self.ranks == 1 << self.power

    @property
    def others(self) -> float:
        """(p - 1) / p: the share of the bytes that is another rank's."""
        return (self.ranks - 1) / self.ranks


Algorithm = Callable[[LinkLevel, float], float]


def _folded(algorithm: Algorithm) -> Algorithm:
    """``algorithm`` for any p: ranks above a power of two hand in all they have first and receive all last."""

    def any_ranks(level: LinkLevel, n: float) -> float:
        if level.is_power:
            return algorithm(level, n)
        return algorithm(LinkLevel(1 << level.power, level.link, level.gamma), n) + level.steps(2, 2 * n, n)

    return any_ranks


# -- allreduce: n bytes on each rank before and after -----------------------------------------------------------------


@_folded
def allreduce_recursive_doubling(level: LinkLevel, n: float) -> float:
    """Everything is exchanged with a partner lg p times: the fewest messages."""
    return level.steps(level.power, level.power * n, level.power * n)


@_folded
def allreduce_rabenseifner(level: LinkLevel, n: float) -> float:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling."""
    return level.steps(2 * level.power, 2 * level.others * n, level.others * n)


def allreduce_ring(level: LinkLevel, n: float) -> float:
    """Reduce-scatter and allgather around a ring: the fewest bytes for any p."""
    return level.steps(2 * (level.ranks - 1), 2 * level.others * n, level.others * n)


# -- allgather: n bytes on each rank afterwards, n / p before ---------------------------------------------------------


def allgather_doubling(level: LinkLevel, n: float) -> float:
    """Recursive doubling; Bruck's algorithm where p is no power of two, which has to put the blocks in order."""
    if level.is_power:
        return level.steps(level.power, level.others * n)
    return level.steps(level.power + 1, level.others * n, n)


def allgather_ring(level: LinkLevel, n: float) -> float:
    """Blocks travel around a ring, straight to their places."""
    return level.steps(level.ranks - 1, level.others * n)


# -- reduce-scatter: n bytes on each rank before, n / p afterwards ----------------------------------------------------


def reduce_scatter_halving(level: LinkLevel, n: float) -> float:
    """Recursive halving; ranks above a power of two hand in all they have first and receive their block last."""
    if level.is_power:
        return level.steps(level.power, level.others * n, level.others * n)
    return level.steps(level.power + 2, 2 * n, (1 + level.others) * n)


def reduce_scatter_pairwise(level: LinkLevel, n: float) -> float:
    """Each rank sends each other one its block."""
    return level.steps(level.ranks - 1, level.others * n, level.others * n)


# -- the cheapest, over one kind of link and over two -----------------------------------------------------------------


def _cheapest(*algorithms: Algorithm) -> Algorithm:
    def chosen(level: LinkLevel, n: float) -> float:
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

    flat: LinkLevel
    node: LinkLevel
    across: LinkLevel

    @property
    def nested(self) -> bool:
        """True if there are two kinds of links to choose between."""
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
