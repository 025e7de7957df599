"""Performing the runs of a data set on all ranks.

:func:`distconv.jobs.mesh.dataset.generate` calls it. Ranks communicate at the beginning and the end. In between they
coordinate by files alone (:mod:`.parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from distconv.errors import DataError
from distconv.jobs import progress as progress_bars
from distconv.jobs.mesh.hydro.initial_conditions import FAMILIES
from distconv.jobs.mesh.hydro.solver import Hydro

from .parts import RunFolder, RunStream
from .run import Criteria, LabelledSnapshot, perform_run, run_seed

if TYPE_CHECKING:
    from mpi4py import MPI
    from tqdm import tqdm

__all__ = ["call_on_rank_0", "produce", "warm_up"]

Result = TypeVar("Result")

# Time after which a rank without work checks again which runs the other ranks have finished.
PATIENCE_S = 0.1


def call_on_rank_0(comm: MPI.Comm | None, action: Callable[[], Result]) -> Result:
    """Call a function on rank 0 and return its result on all ranks. Collective: call on every rank.

    Unlike in ``agreement.try_on_rank_0``, the wait of the other ranks has no time limit: assembling a large file may
    take longer than ``DISTCONV_TIMEOUT_S``.

    Parameters
    ----------
    comm : MPI.Comm, optional
        The ranks; None for this process alone.
    action : callable
        Called without arguments. Its result must be picklable.

    Returns
    -------
    Result
        The result of rank 0.

    Raises
    ------
    DataError
        On all ranks, with the message of rank 0.

    Warnings
    --------
    Only a DataError is raised on all ranks. After any other exception of ``action``, the other ranks wait for rank 0.
    """
    if comm is None or comm.size == 1:
        return action()
    result: Result | None = None
    failure: str | None = None
    if comm.rank == 0:
        try:
            result = action()
        except DataError as error:
            failure = str(error)
    result, failure = comm.bcast((result, failure), root=0)
    if failure is not None:
        raise DataError(failure)
    return result


def warm_up(comm: MPI.Comm | None) -> None:
    """Compile the kernels on rank 0 so that the other ranks find them in the cache. Collective: call on every rank."""
    criteria = Criteria(tau=0.002, least_labelled=0.0, last_time=0.003)
    call_on_rank_0(comm, lambda: bool(perform_run("vortices", 16, run_seed(0, 0, 0, 0), criteria)))


def produce(
    parts: RunFolder,
    streams_needed: list[RunStream],
    *,
    size: int,
    seed: int,
    criteria: Criteria,
    comm: MPI.Comm | None,
    progress: bool,
    on_first_sample: Callable[[str, LabelledSnapshot], None] | None = None,
) -> None:
    """Perform all runs that are needed and not finished. Collective: call on every rank.

    Parameters
    ----------
    parts : RunFolder
        Folder of finished runs.
    streams_needed : list of RunStream
        The streams of the data set.
    size : int
        Number of cells along each side.
    seed : int
        Seed of the data set.
    criteria : Criteria
        Definition of labels, and conditions for accepting a snapshot.
    comm : MPI.Comm, optional
        The ranks; None for this process alone.
    progress : bool
        If True, rank 0 shows a progress bar.
    on_first_sample : callable, optional
        Called on rank 0 with the family and the last sample of its first run that has samples.

    Raises
    ------
    DataError
        On all ranks, if any of them cannot write, or a stream does not reach its quota.
    """
    warm_up(comm)
    rank = 0 if comm is None else comm.rank
    failure: str | None = None
    total = sum(stream.quota for stream in streams_needed)
    with progress_bars.progress_bar(
        rank=rank if progress else -1, total=total, unit="sample", desc=f"{size} x {size}"
    ) as bar:
        try:
            callback = on_first_sample if rank == 0 else None
            perform_runs(
                parts, streams_needed, size=size, seed=seed, criteria=criteria, bar=bar, on_first_sample=callback
            )
        except DataError as error:
            failure = str(error)
            parts.stop_file.touch()  # the other ranks stop after their current run, and reach the allgather below
    failures = [failure] if comm is None else comm.allgather(failure)
    for text in failures:
        if text is not None:
            raise DataError(text)


def perform_runs(
    parts: RunFolder,
    streams_needed: list[RunStream],
    *,
    size: int,
    seed: int,
    criteria: Criteria,
    bar: tqdm[NoReturn],
    on_first_sample: Callable[[str, LabelledSnapshot], None] | None,
) -> None:
    """Perform runs on this rank until no more are needed or another rank has given up: claim, run, store.

    Parameters
    ----------
    parts, streams_needed, size, seed, criteria, on_first_sample
        As in :func:`produce`.
    bar : tqdm
        Progress bar; its total is the number of samples.

    Raises
    ------
    DataError
        On this rank.
    """
    while not parts.stop_file.exists():
        parts.check(streams_needed)
        done = sum(parts.available_samples(stream) for stream in streams_needed)
        bar.update(done - bar.n)
        if done == bar.total:
            return
        run = parts.claim(streams_needed)
        if run is None:
            time.sleep(PATIENCE_S)
        else:
            family = list(FAMILIES)[run.family]
            watch = partial(show_progress, bar, run.name)
            result = perform_run(family, size, run.seed(seed), criteria, watch)
            parts.store(run, result)
            if on_first_sample is not None and result.samples:
                on_first_sample(family, result.samples[-1])
                on_first_sample = None


def show_progress(bar: tqdm[NoReturn], name: str, hydro: Hydro) -> None:
    """Show the progress of the current run, which may take hours.

    Parameters
    ----------
    bar : tqdm.tqdm
    name : str
        Name of the run.
    hydro : Hydro
    """
    bar.set_postfix_str(f"{name}: t = {hydro.time:.3f}, step {hydro.steps}", refresh=False)
    bar.update(0)
