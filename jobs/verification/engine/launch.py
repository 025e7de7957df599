"""Runs cases on the ranks of this job, or in jobs of several ranks that a command starts, one after the other."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.training.pipelines.options import counts
from distconv.jobs.verification.engine.journal import Journal, Key, Line
from distconv.jobs.verification.engine.runner import Case, CaseRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--ranks``, ``--mpiexec`` and ``--journal``."""
    parser.add_argument(
        "--ranks",
        type=counts,
        metavar="2,3,4",
        help="start one MPI job for each of these numbers of ranks (default: use the ranks of this job)",
    )
    parser.add_argument("--mpiexec", default=mpiexec(), help="command that starts an MPI job (default: %(default)s)")
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="append results to this file as they arrive, and resume after the results that it holds",
    )


def mpiexec() -> str:
    """Return the path of mpiexec: that of the Python environment, otherwise the first one in PATH."""
    installed = Path(sys.prefix) / "bin" / "mpiexec"
    return str(installed) if installed.exists() else shutil.which("mpiexec") or "mpiexec"


def run(
    job: CaseRun, groups: Iterable[tuple[str, Iterable[Case]]], path: Path | None, tell: Callable[[list[Line]], None]
) -> list[Line]:
    """Compute the cases that the journal does not hold yet. Collective.

    Parameters
    ----------
    job : CaseRun
        Computes a case.
    groups : iterable of (str, iterable of Case)
        Name of a family, and cases whose lines rank 0 reports together.
    path : pathlib.Path or None
        The journal, if there is one.
    tell : callable
        Called with the lines of each group.

    Returns
    -------
    list of Line
        All lines of this number of ranks.
    """
    journal = Journal(path if job.comm.rank == 0 else None)
    # Only rank 0 has the file. All ranks must skip the same cases, whose computation is collective.
    begun, families = job.comm.bcast(journal.begun), set[str]()
    for family, cases in groups:
        families.add(family)
        results: list[Line] = []
        for case in cases:
            key = Key(family, job.comm.size, case.operator, case.option)
            if key not in begun:
                journal.begin(key)  # before the case, which may hang: the next job resumes after it
                lines = list(job.lines(family, case))
                journal.end(lines)
                results += lines
        if job.comm.rank == 0 and results:
            tell(results)
    own = [line for line in journal.lines if line.family in families and line.ranks == job.comm.size]
    shared: list[Line] = job.comm.bcast(own)
    return shared


def past_hangs(launcher: str, ranks: int, arguments: Sequence[str], path: Path) -> None:
    """Start jobs that resume from the journal until one completes.

    Parameters
    ----------
    launcher : str
        Command that starts an MPI job.
    ranks : int
        Number of ranks.
    arguments : sequence of str
        Arguments of ``distconv``.
    path : pathlib.Path
        The journal.

    Raises
    ------
    DistconvError
        If a job fails otherwise than in a case.
    """
    while True:
        failed = None
        try:
            start(launcher, ranks, [*arguments, "--journal", str(path)])
        except DistconvError as error:
            failed = error
        # The journal decides, not the exit code: a job that was killed in a case may end with code 1, too.
        if not Journal(path).end_with_a_hang():
            if failed:
                raise failed
            return


def start(launcher: str, ranks: int, arguments: Sequence[str]) -> int:
    """Run ``distconv`` in a new MPI job with one thread per rank.

    Parameters
    ----------
    launcher : str
        Command that starts an MPI job.
    ranks : int
        Number of ranks.
    arguments : sequence of str
        Arguments of ``distconv``.

    Returns
    -------
    int
        0, or 1 if it found something wrong.

    Raises
    ------
    DistconvError
        If this is a job of several ranks itself, there is no such launcher, or the job fails.
    """
    if MPI.COMM_WORLD.size > 1:
        raise DistconvError("--ranks starts jobs by itself; call it without mpiexec")
    command = [*launcher.split(), "-n", str(ranks), sys.executable, "-m", "distconv", *arguments]
    print(f"== {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    try:
        # torch draws the samples of some operators from sets, whose order must be the same on all ranks.
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        code = subprocess.run(command, env=defaults | os.environ).returncode
    except OSError as error:
        raise DistconvError(f"--mpiexec {launcher}: {error}") from error
    if code not in (0, 1):
        raise DistconvError(f"the job on {ranks} ranks ended with exit code {code}")
    return code
