"""Starts jobs under mpiexec, ends them in time, and leaves no process and no shared-memory segment behind."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import IO

MARK = "DISTCONV_TEST_JOB"
"""Environment variable by which the processes of a job are known, whatever session or group they moved to."""

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Read, not imported: an import of distconv would start MPI here.
_LAUNCHERS = (Path(__file__).parents[2] / "distconv" / "process" / "launchers.py").read_text()
LAUNCHER_PREFIXES: tuple[str, ...] = ast.literal_eval(re.findall(r"^PREFIXES = (\(.+\))$", _LAUNCHERS, re.M)[0])
ON_RANKS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
ON_RANKS |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
"""One thread for each rank; and there may be more ranks than cores, so MPICH's waits must not keep one busy."""


class JobTimeout(AssertionError):
    """The job was still running at its limit and has been killed; the message holds what it had printed."""


def launched_rank() -> int | None:
    """This process's rank if a launcher started it, else None. Asks the environment, so MPI need not be started."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)


@functools.cache
def mpiexec_command() -> tuple[str, ...]:
    """mpiexec with the flags that let it run as root with more ranks than cores."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise FileNotFoundError(f"no mpiexec in {beside.parent} nor on PATH: pip install mpich")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, env=_clean_environment()).stdout
    if "Open MPI" not in version and "PRRTE" not in version:
        return (path,)
    yielding = ("--mca", "mpi_yield_when_idle", "1")
    return (path, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *yielding)


def mpiexec(
    ranks: int,
    program: str | Path,
    *arguments: str,
    timeout: float = 20.0,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` on ``ranks`` ranks and return its exit code, stdout and stderr.

    ``program`` is Python code, or the Path of a script. Threads per rank are limited to one.

    Raises
    ------
    JobTimeout
        If the job takes longer than ``timeout`` seconds.
    AssertionError
        If one of its processes outlives the job by 5 seconds.
    """
    with Job(ranks, program, *arguments, env=env, cwd=cwd) as job:
        return job.wait(timeout)


RUNNING: list[Job] = []
"""Jobs that have been started and not ended."""


class Job:
    """A running job, for tests that do something to it: ``with Job(2, code) as job: os.kill(job.ranks()[1], 9)``."""

    def __init__(
        self,
        ranks: int,
        program: str | Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        capture: bool = True,
    ) -> None:
        """Start it. ``ranks=0`` starts one process without mpiexec; without ``capture`` output goes where ours goes."""
        launcher = (*mpiexec_command(), "-n", str(ranks)) if ranks else ()
        code = [str(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
        command = [*launcher, sys.executable, *code, *arguments]
        self.mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
        environment = _clean_environment() | (ON_RANKS if ranks else {}) | (env or {}) | {MARK: self.mark}
        self._started = time.time()
        # Files, not pipes: nobody has to read them, and a process left behind cannot hold them open.
        self._stdout = _file() if capture else None
        self._stderr = _file() if capture else None
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )
        RUNNING.append(self)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._stdout, self._stderr):
            if stream is not None:
                stream.close()

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the job's end, see ``mpiexec``."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise JobTimeout(f"still running after {timeout:g} s\n{self.output()}") from None
        orphans = self._orphans(patience_s=5.0)
        self.kill()
        if orphans:
            raise AssertionError(f"processes {orphans} outlived the job (exit code {code})\n{self.output()}")
        return subprocess.CompletedProcess(self.process.args, code, *self._streams())

    def ranks(self) -> dict[int, int]:
        """Process id of each rank that is alive."""
        found = {}
        for pid in self.processes():
            variables = _environment_of(pid)
            rank = next((variables[name] for name in RANK_VARIABLES if name in variables), None)
            if rank is not None:
                found[int(rank)] = pid
        return found

    def processes(self) -> list[int]:
        """Ids of all living processes of this job, and of the jobs that it started."""
        return [pid for pid in _own_processes() if _environment_of(pid).get(MARK, "").startswith(self.mark)]

    def kill(self) -> None:
        """End every process of the job, now, and remove the shared memory that it leaves."""
        if self.process.poll() is None:
            _signal(self.process.pid, signal.SIGKILL)
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()
        _remove_segments(since=self._started)
        if self in RUNNING:
            RUNNING.remove(self)

    def output(self) -> str:
        """Return the output of the job until now."""
        stdout, stderr = self._streams()
        return f"--- stdout\n{stdout}\n--- stderr\n{stderr}"

    def _streams(self) -> tuple[str, str]:
        texts = []
        for stream in (self._stdout, self._stderr):
            # Opened again: the job's processes write at the offset of the file that they were given.
            texts.append(Path(f"/proc/self/fd/{stream.fileno()}").read_text() if stream is not None else "")
        return texts[0], texts[1]

    def _orphans(self, patience_s: float) -> list[int]:
        until = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return left


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def _clean_environment() -> dict[str, str]:
    """Our environment without what a launcher put there: a job started from a rank is a job of its own."""
    if launched_rank() is None:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


def _own_processes() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == os.getuid():
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return [pid for pid in found if pid != os.getpid()]


def _environment_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _remove_segments(since: float) -> None:
    """Remove MPICH's segments made after ``since`` that no living process has; other jobs' stay."""
    made = set()
    for path in Path("/dev/shm").glob("mpich_shm_*"):
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and status.st_mtime >= since - 1:
            made.add(path)
    if made:
        for pid in _own_processes():
            made -= segments_of(pid)
    for path in made:
        path.unlink(missing_ok=True)


def segments_of(pid: int) -> set[Path]:
    """MPICH's shared memory that a process has: open or mapped (in this order: who makes one opens it before)."""
    names = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                names.append(str(link.readlink()))
        names += [line.rpartition(" ")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(name) for name in names if name.startswith("/dev/shm/mpich_shm_")}
