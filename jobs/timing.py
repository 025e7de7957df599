"""Timing of variants in interleaved runs, so that a drift of the machine's speed affects all of them equally.

Benchmarks and the measurements of planned steps use it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from mpi4py import MPI

from distconv.communication.agreement import as_in_later_steps
from distconv.jobs.planning.options import barrier_without_polling

K = TypeVar("K")

CPU = torch.device("cpu")

Variant = Callable[[], float]
"""Runs an action and returns its seconds on this rank."""


def idle() -> float:
    """Do nothing: the variant of a rank that does not take part."""
    return 0.0


def timed_variants(actions: Mapping[K, Callable[[], object]], device: torch.device = CPU) -> dict[K, Variant]:
    """Return variants that time the given actions.

    Parameters
    ----------
    actions : mapping
        Actions by name.
    device : torch.device
        If it is a GPU, its queued work is included in the time.

    Returns
    -------
    dict
        Variants by name.
    """

    def variant(action: Callable[[], object]) -> Variant:
        def run() -> float:
            start = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - start

        return run

    return {name: variant(action) for name, action in actions.items()}


def time_interleaved(
    comm: MPI.Intracomm, variants: Mapping[K, Variant], rounds: int, *, warm_up: int = 1, asleep: bool = False
) -> dict[K, list[float]]:
    """Time variants in interleaved rounds. Collective: call on every rank of ``comm``.

    A barrier precedes each variant. Its time is that of the slowest rank. The order of operations is not compared,
    which would happen in the first steps only.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    variants : mapping
        Variants by name, in the same order on all ranks.
    rounds : int
        Measured rounds.
    warm_up : int
        Rounds before them, which are not measured.
    asleep : bool
        True lets ranks that have finished sleep, which leaves their cores to the others. Otherwise MPI may poll.

    Returns
    -------
    dict
        Seconds of each measured round, by name. The same on all ranks.
    """
    times: dict[K, list[float]] = {name: [] for name in variants}
    with as_in_later_steps():
        for number in range(warm_up + rounds):
            for name, variant in variants.items():
                comm.Barrier()
                seconds = variant()
                # Before the allreduce, in which the ranks that wait would poll and slow down the others.
                if asleep:
                    barrier_without_polling(comm)
                slowest = comm.allreduce(seconds, MPI.MAX)
                if number >= warm_up:
                    times[name].append(slowest)
    return times


def time_action(comm: MPI.Intracomm, device: torch.device, action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank, after a barrier. Collective: call on every rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    device : torch.device
        If it is a GPU, its queued work is included in the time.
    action : callable

    Returns
    -------
    float
        The same on all ranks.
    """
    return time_interleaved(comm, timed_variants({"": action}, device), 1, warm_up=0)[""][0]


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """Return the median of the times of each variant."""
    return {name: statistics.median(values) for name, values in times.items()}


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with Bessel's correction, or 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
