"""Starts jobs of several ranks, one after the other, from a command that was called on one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.training.pipeline_options import counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--ranks`` and ``--mpiexec``."""
    parser.add_argument("--ranks", type=counts, metavar="2,3,4", help="start mpiexec itself for each of these counts")
    parser.add_argument("--mpiexec", default=mpiexec(), help="how to start a job (default: %(default)s)")


def mpiexec() -> str:
    """How to start ranks: the environment's own mpiexec, or the one in the path."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def start(launcher: str, ranks: int, arguments: Sequence[str]) -> int:
    """Run ``distconv arguments`` on ``ranks`` ranks, one thread each; returns 0, or 1 if it found something wrong.

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
        code = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    except OSError as error:
        raise DistconvError(f"--mpiexec {launcher}: {error}") from error
    if code not in (0, 1):
        raise DistconvError(f"the job on {ranks} ranks ended with exit code {code}")
    return code
