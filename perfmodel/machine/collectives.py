"""Time of collective communication: the fastest of several algorithms for the size.

The model has alpha (seconds per message), beta (seconds per byte sent) and gamma (seconds per byte added to another).
p is the number of ranks, n the number of bytes. :class:`.Machine` calls the functions with its own links.

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
    """Ranks of which any two are connected by the same link.

    Attributes
    ----------
    ranks : int
        Number of ranks p.
    link : Link
        Link between any two ranks.
    gamma : float
        Seconds per byte that a rank adds.
    """

    ranks: int
    link: Link
    gamma: float

    def step_time(self, messages: float, nbytes: float, summed: float = 0.0) -> float:
        """Return the time of a rank that sends messages and adds bytes.

        Parameters
        ----------
        messages : float
            Number of messages.
        nbytes : float
            Bytes of all messages.
        summed : float
            Bytes that the rank adds.

        Returns
        -------
        float
            Seconds.
        """
        return messages * self.link.collective_s + nbytes / self.link.bandwidth_bytes_per_s + summed * self.gamma

    @property
    def log2_power(self) -> int:
        """Logarithm (base 2) of the largest power of two that is at most p."""
        return self.ranks.bit_length() - 1

    @property
    def is_power(self) -> bool:
        """True if p is a power of two."""
        return self.ranks == 1 << self.log2_power

    @property
    def others_fraction(self) -> float:
        """(p - 1) / p: the fraction of the bytes that other ranks own."""
        return (self.ranks - 1) / self.ranks


Algorithm = Callable[[LinkLevel, float], float]


def _extend_to_any_size(algorithm: Algorithm) -> Algorithm:
    """Extend ``algorithm`` to any p.

    Ranks above the largest power of two send all their data first and receive the result last.
    """

    def any_ranks(level: LinkLevel, n: float) -> float:
        if level.is_power:
            return algorithm(level, n)
        return algorithm(LinkLevel(1 << level.log2_power, level.link, level.gamma), n) + level.step_time(2, 2 * n, n)

    return any_ranks


# -- allreduce: n bytes on each rank before and after -----------------------------------------------------------------


@_extend_to_any_size
def allreduce_recursive_doubling(level: LinkLevel, n: float) -> float:
    """Return the time of recursive doubling, which exchanges all bytes log2(p) times: the fewest messages.

    Parameters
    ----------
    level : LinkLevel
    n : float
        Bytes on each rank.

    Returns
    -------
    float
        Seconds.
    """
    return level.step_time(level.log2_power, level.log2_power * n, level.log2_power * n)


@_extend_to_any_size
def allreduce_rabenseifner(level: LinkLevel, n: float) -> float:
    """Return the time of a reduce-scatter by recursive halving and an allgather by recursive doubling.

    Parameters
    ----------
    level, n
        As in :func:`allreduce_recursive_doubling`.

    Returns
    -------
    float
        Seconds.
    """
    return level.step_time(2 * level.log2_power, 2 * level.others_fraction * n, level.others_fraction * n)


def allreduce_ring(level: LinkLevel, n: float) -> float:
    """Return the time of a reduce-scatter and an allgather around a ring: the fewest bytes for any p.

    Parameters
    ----------
    level, n
        As in :func:`allreduce_recursive_doubling`.

    Returns
    -------
    float
        Seconds.
    """
    return level.step_time(2 * (level.ranks - 1), 2 * level.others_fraction * n, level.others_fraction * n)


# -- allgather: n bytes on each rank afterwards, n / p before ---------------------------------------------------------


def allgather_doubling(level: LinkLevel, n: float) -> float:
    """Return the time of recursive doubling, or of Bruck's algorithm if p is not a power of two.

    Bruck's algorithm reorders the blocks at the end.

    Parameters
    ----------
    level : LinkLevel
    n : float
        Bytes on each rank afterwards.

    Returns
    -------
    float
        Seconds.
    """
    if level.is_power:
        return level.step_time(level.log2_power, level.others_fraction * n)
    return level.step_time(level.log2_power + 1, level.others_fraction * n, n)


def allgather_ring(level: LinkLevel, n: float) -> float:
    """Return the time of an allgather around a ring, which needs no reordering.

    Parameters
    ----------
    level, n
        As in :func:`allgather_doubling`.

    Returns
    -------
    float
        Seconds.
    """
    return level.step_time(level.ranks - 1, level.others_fraction * n)


# -- reduce-scatter: n bytes on each rank before, n / p afterwards ----------------------------------------------------


def reduce_scatter_halving(level: LinkLevel, n: float) -> float:
    """Return the time of recursive halving.

    If p is not a power of two, the surplus ranks send their data first and receive their block last.

    Parameters
    ----------
    level : LinkLevel
    n : float
        Bytes on each rank before.

    Returns
    -------
    float
        Seconds.
    """
    if level.is_power:
        return level.step_time(level.log2_power, level.others_fraction * n, level.others_fraction * n)
    return level.step_time(level.log2_power + 2, 2 * n, (1 + level.others_fraction) * n)


def reduce_scatter_pairwise(level: LinkLevel, n: float) -> float:
    """Return the time in which each rank sends every other rank its block.

    Parameters
    ----------
    level, n
        As in :func:`reduce_scatter_halving`.

    Returns
    -------
    float
        Seconds.
    """
    return level.step_time(level.ranks - 1, level.others_fraction * n, level.others_fraction * n)


# -- the fastest algorithm, over one level of links and over two ------------------------------------------------------


def _cheapest(*algorithms: Algorithm) -> Algorithm:
    def chosen(level: LinkLevel, n: float) -> float:
        return min(algorithm(level, n) for algorithm in algorithms) if level.ranks > 1 and n else 0.0

    return chosen


flat_allreduce = _cheapest(allreduce_recursive_doubling, allreduce_rabenseifner, allreduce_ring)
flat_allgather = _cheapest(allgather_doubling, allgather_ring)
flat_reduce_scatter = _cheapest(reduce_scatter_halving, reduce_scatter_pairwise)


@dataclass(frozen=True)
class Levels:
    """Ranks of a group on several nodes, as one level and as two.

    Attributes
    ----------
    flat : LinkLevel
        All ranks, on the link between nodes (on the node's link if there is one node).
    node : LinkLevel
        Ranks of one node.
    across : LinkLevel
        One rank of each node. As many such sets communicate at the same time as a node has ranks.
    """

    flat: LinkLevel
    node: LinkLevel
    across: LinkLevel

    @property
    def nested(self) -> bool:
        """True if both levels have several ranks, so that algorithms over two levels apply."""
        return self.node.ranks > 1 and self.across.ranks > 1


def allreduce(levels: Levels, n: float) -> float:
    """Return the time of an all-reduce: flat, or over two levels if that is faster.

    The algorithm over two levels is a reduce-scatter within the node, an all-reduce of each part between nodes, and an
    allgather within the node.

    Parameters
    ----------
    levels : Levels
    n : float
        Bytes on each rank.

    Returns
    -------
    float
        Seconds.
    """
    flat = flat_allreduce(levels.flat, n)
    if not levels.nested:
        return flat
    # Each rank of a node reduces its part between nodes, all parts at the same time.
    between = flat_allreduce(levels.across, n / levels.node.ranks)
    return min(flat, flat_reduce_scatter(levels.node, n) + between + flat_allgather(levels.node, n))


def allgather(levels: Levels, n: float) -> float:
    """Return the time of an allgather: flat, or over two levels if that is faster.

    The algorithm over two levels is an allgather of each part between nodes, then of all parts within the node.

    Parameters
    ----------
    levels : Levels
    n : float
        Bytes on each rank afterwards.

    Returns
    -------
    float
        Seconds.
    """
    flat = flat_allgather(levels.flat, n)
    if not levels.nested:
        return flat
    return min(flat, flat_allgather(levels.across, n / levels.node.ranks) + flat_allgather(levels.node, n))


def reduce_scatter(levels: Levels, n: float) -> float:
    """Return the time of a reduce-scatter: flat, or over two levels if that is faster.

    The algorithm over two levels is a reduce-scatter within the node, then one of each part between nodes.

    Parameters
    ----------
    levels : Levels
    n : float
        Bytes on each rank before.

    Returns
    -------
    float
        Seconds.
    """
    flat = flat_reduce_scatter(levels.flat, n)
    if not levels.nested:
        return flat
    return min(flat, flat_reduce_scatter(levels.node, n) + flat_reduce_scatter(levels.across, n / levels.node.ranks))


def messages_time(levels: Levels, peers: int, nbytes: float) -> float:
    """Return the time to send some other ranks a message each, as many as possible on the same node.

    Parameters
    ----------
    levels : Levels
    peers : int
        Number of receiving ranks.
    nbytes : float
        Bytes of each message.

    Returns
    -------
    float
        Seconds.
    """
    near = min(peers, levels.node.ranks - 1)
    far = peers - near
    return near * levels.node.link.send(nbytes) + far * levels.flat.link.send(nbytes)
