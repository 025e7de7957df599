"""Doing the runs of a data set on all ranks together."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from distconv.communication.agreement import together, try_on_rank_0
from distconv.errors import DataError
from distconv.jobs import progress as progress_bars
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES
from distconv.jobs.mesh.hydro.solver import Hydro

from .parts import Parts, Stream
from .run import Criteria, perform_run, run_seed

if TYPE_CHECKING:
    from mpi4py import MPI
    from tqdm import tqdm

__all__ = ["produce", "warm_up"]

# How long a rank without work waits before it looks again what the others have finished.
PATIENCE_S = 0.1


def warm_up(comm: MPI.Intracomm) -> None:
    """Compile the kernels on rank 0 first, so that the other ranks find them in the cache."""
    criteria = Criteria(tau=0.002, least_labelled=0.0, last_time=0.003)
    try_on_rank_0(comm, lambda: bool(perform_run("vortices", 16, run_seed(0, 0, 0, 0), criteria)), DataError)


def produce(
    parts: Parts,
    wanted: list[Stream],
    *,
    size: int,
    seed: int,
    criteria: Criteria,
    comm: MPI.Intracomm,
    progress: bool,
) -> None:
    """Do all runs that ``wanted`` needs and that ``parts`` does not hold. Collective.

    Raises
    ------
    DataError
        On all ranks, if one cannot write or a stream never meets its quota.
    """
    warm_up(comm)
    shown = comm.rank if progress else -1
    total = sum(stream.quota for stream in wanted)

    def share() -> None:
        with progress_bars.bar(rank=shown, total=total, unit="sample", desc=f"{size} x {size}") as bar:
            try:
                work(parts, wanted, size=size, seed=seed, criteria=criteria, bar=bar)
            except Exception:
                parts.alarm_file.touch()
                raise

    together(comm, share, DataError)


def work(parts: Parts, wanted: list[Stream], *, size: int, seed: int, criteria: Criteria, bar: tqdm[NoReturn]) -> None:
    """One rank's share of the runs: claim, run, store, until nothing is missing or another rank gives up."""
    while not parts.alarm_file.exists():
        parts.check(wanted)
        done = sum(parts.done(stream) for stream in wanted)
        bar.update(done - bar.n)
        if done == bar.total:
            return
        run = parts.claim(wanted)
        if run is None:
            time.sleep(PATIENCE_S)
        else:
            family = list(FAMILIES)[run.family]
            watch = partial(show, bar, run.name)
            parts.store(run, perform_run(family, size, run.seed(seed), criteria, watch))


def show(bar: tqdm[NoReturn], name: str, hydro: Hydro) -> None:
    """Show how far the current run is; a large one takes hours."""
    bar.set_postfix_str(f"{name}: t = {hydro.time:.3f}, step {hydro.steps}", refresh=False)
    bar.update(0)
