"""Measurement of links under MPI, with the messages and all-reduces that distconv itself sends.

All ranks of a node exchange at the same time, in pairs, so that a link is one rank's fraction of the node's bandwidth.
``distconv machine`` calls :func:`profile_network`.

Source: Dryden et al. 2019, V-A (SR(n), the time to send and receive n; AR(p, n), measured separately because it does
not follow from the time of messages; warm-up, then the average of ten).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from mpi4py import MPI

from distconv.communication.transport import Exchange, Message, allreduce
from distconv.perfmodel.machine.links import Link

SIZES = tuple(8 << shift for shift in range(0, 21, 2))
"""Bytes per message: 8 B to 8 MB."""

_MESSAGES_PER_MEASUREMENT = 10
_REPETITIONS = 7


@dataclass(frozen=True)
class LinkProfile:
    """Links fitted to halo exchanges, and links fitted to all-reduces.

    Attributes
    ----------
    exchange : Link
        Exchange with one neighbour.
    allreduce : Link
        An all-reduce of n bytes takes ``allreduce.send(n)``.
    """

    exchange: Link
    allreduce: Link


@dataclass(frozen=True)
class NetworkProfile:
    """Links between ranks of a node and between nodes.

    Attributes
    ----------
    node : LinkProfile or None
        All-reduces over all ranks of a node. None if no node has two ranks.
    network : LinkProfile or None
        All-reduces over one rank of each node, all ranks of a node at the same time. None if there is one node.
    """

    node: LinkProfile | None
    network: LinkProfile | None


def profile_network(comm: MPI.Intracomm, device: torch.device | str = "cpu") -> NetworkProfile:
    """Measure messages and all-reduces of 8 B to 8 MB. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        Ranks that communicate.
    device : device
        Device of the tensors.

    Returns
    -------
    NetworkProfile
        Fitted links, identical on all ranks.
    """
    nodes = node_indices(comm)
    # Two splits, on all ranks in this order: the ranks of a node, and the ranks of equal position on all nodes.
    inside = MPI.Intracomm(comm.Split(nodes[comm.rank], comm.rank))
    across = MPI.Intracomm(comm.Split(inside.rank, comm.rank))
    try:
        return NetworkProfile(
            node=_profile(comm, inside, near_partners(nodes), device),
            network=_profile(comm, across, far_partners(nodes), device),
        )
    finally:
        across.Free()
        inside.Free()


def node_indices(comm: MPI.Intracomm) -> list[int]:
    """Return for each rank the lowest rank that shares its node. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        Ranks to locate.

    Returns
    -------
    list of int
        One entry per rank, identical on all ranks.
    """
    # The lowest rank of a node has rank 0 in its communicator, because ranks are ordered by `comm.rank`.
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = shared.bcast(comm.rank)
    shared.Free()
    return list(comm.allgather(first))


def near_partners(nodes: Sequence[int]) -> dict[int, int]:
    """Return partners on the same node: the first half of a node's ranks with the second half.

    Parameters
    ----------
    nodes : sequence of int
        Node of each rank.

    Returns
    -------
    dict of int to int
        Partner of each rank. The last rank of an odd number has none.

    Examples
    --------
    >>> near_partners([0, 0, 0, 3, 3])
    {0: 1, 1: 0, 3: 4, 4: 3}
    """
    pairs: list[tuple[int, int]] = []
    for ranks in _by_node(nodes):
        half = len(ranks) // 2
        pairs += zip(ranks[:half], ranks[half : 2 * half], strict=True)
    return _as_two_way(pairs)


def far_partners(nodes: Sequence[int]) -> dict[int, int]:
    """Return partners on another node: the ranks of the first, third, ... node with those of the next node.

    Parameters
    ----------
    nodes : sequence of int
        Node of each rank.

    Returns
    -------
    dict of int to int
        Partner of each rank. Surplus ranks of the larger node have none.

    Examples
    --------
    >>> far_partners([0, 0, 0, 3, 3])
    {0: 3, 1: 4, 3: 0, 4: 1}
    """
    pairs: list[tuple[int, int]] = []
    groups = _by_node(nodes)
    for here, there in zip(groups[::2], groups[1::2], strict=False):
        pairs += zip(here, there, strict=False)
    return _as_two_way(pairs)


def _by_node(nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, of in enumerate(nodes) if of == node] for node in sorted(set(nodes))]


def _as_two_way(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    return dict(sorted([*pairs, *((b, a) for a, b in pairs)]))


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Return the link whose ``send`` is closest to measured times: least squares of the relative error.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each message.
    seconds : sequence of float
        Time of each message.

    Returns
    -------
    Link
        Latency and bandwidth, both positive.

    Examples
    --------
    >>> round(fit_link([10, 100, 1000], [3.0, 12.0, 102.0]).send(500), 6)
    52.0
    """
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    # In units of the shortest time and of the best seconds per byte, both unknowns are near 1. The bound keeps noise
    # from making either of them negative.
    shortest, fastest = t.min(), (t / n).min()
    terms = np.stack([shortest / t, fastest * n / t], axis=1)
    costs = scipy.optimize.lsq_linear(terms, np.ones(len(t)), bounds=(1e-3, np.inf)).x
    return Link(latency_s=float(costs[0] * shortest), bandwidth_bytes_per_s=float(1 / (costs[1] * fastest)))


def _profile(
    comm: MPI.Intracomm, reducing: MPI.Intracomm, partners: dict[int, int], device: torch.device | str
) -> LinkProfile | None:
    """Return the links between ``partners`` and over ``reducing``; None without partners. Collective.

    ``partners`` are ranks of ``comm``.
    """
    # `partners` has the pairs of all ranks, so all of them return here or none. A rank without a partner takes part in
    # the barriers and all-reduces below.
    if not partners:
        return None
    partner = partners.get(comm.rank)
    exchanges, allreduces = [], []
    for size in SIZES:
        sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))
        sends: list[Message] = [] if partner is None else [(partner, sent)]
        receives: list[Message] = [] if partner is None else [(partner, received)]

        def exchange(sends: list[Message] = sends, receives: list[Message] = receives) -> None:
            Exchange(comm, sends, receives, "measured exchange").wait()

        def reduce(tensor: torch.Tensor = sent) -> None:
            allreduce(reducing, tensor, "measured allreduce")

        # All ranks measure the sizes in this order, also those without a partner.
        exchanges.append(_seconds(comm, exchange))
        allreduces.append(_seconds(comm, reduce))
    return LinkProfile(fit_link(SIZES, exchanges), fit_link(SIZES, allreduces))


def _seconds(comm: MPI.Intracomm, action: Callable[[], None]) -> float:
    """Return the time of ``action``, identical on all ranks. Collective.

    It is the mean of ten runs, the median of the repetitions, and the maximum over ranks. The number of calls depends
    on nothing that is measured. Otherwise ranks would wait for each other forever.
    """
    # The first repetition is the warm-up.
    means = []
    for _ in range(1 + _REPETITIONS):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(_MESSAGES_PER_MEASUREMENT):
            action()
        if torch.cuda.is_initialized():  # copies to the device may still be running
            torch.cuda.synchronize()
        means.append((time.perf_counter() - start) / _MESSAGES_PER_MEASUREMENT)
    return float(comm.allreduce(statistics.median(means[1:]), MPI.MAX))
