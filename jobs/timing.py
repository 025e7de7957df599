"""Times of variants that take turns, so that a drift of the machine's speed meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from mpi4py import MPI

from distconv.jobs.planning.options import wait_asleep

K = TypeVar("K")

CPU = torch.device("cpu")

Variant = Callable[[], float]
"""Does something, and gives its seconds on this rank."""


def idle() -> float:
    """What a rank does that has no part in a variant."""
    return 0.0


def clocked(actions: Mapping[K, Callable[[], object]], device: torch.device = CPU) -> dict[K, Variant]:
    """The actions as variants."""

    def variant(action: Callable[[], object]) -> Variant:
        def run() -> float:
            start = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - start

        return run

    return {name: variant(action) for name, action in actions.items()}


def in_turns(
    comm: MPI.Intracomm, variants: Mapping[K, Variant], rounds: int, *, warm_up: int = 1, asleep: bool = False
) -> dict[K, list[float]]:
    """Seconds of each variant in each round, until the slowest rank is done; all ranks begin together. Collective.

    Before come ``warm_up`` rounds. ``asleep``: ranks that are done leave their cores to the others.
    """
    times: dict[K, list[float]] = {name: [] for name in variants}
    for turn in range(warm_up + rounds):
        for name, variant in variants.items():
            comm.Barrier()
            seconds = variant()
            if asleep:
                wait_asleep(comm)
            slowest = comm.allreduce(seconds, MPI.MAX)
            if turn >= warm_up:
                times[name].append(slowest)
    return times


def timed(comm: MPI.Intracomm, device: torch.device, action: Callable[[], object]) -> float:
    """Seconds until all ranks of ``comm`` are done with ``action``, which they begin together. Collective."""
    return in_turns(comm, clocked({"": action}, device), 1, warm_up=0)[""][0]


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in times.items()}


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample, as an estimate of that of all; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
