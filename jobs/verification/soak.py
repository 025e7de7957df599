"""Inject random faults into a training run, and compare its result with an undisturbed run.

A network learns the embedded digits. Its job is killed, stopped, paused and deprived of disk space, and its newest
checkpoint is damaged; each time it resumes with --resume whole. At the end all losses, the weights, the optimizer's
state and the random generator must be identical to those of the undisturbed run, bit for bit. The exit code is 1 if
they differ, if a job hangs, or if a disturbed job reports success.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.checkpoint.manifest import Commit, commits
from distconv.errors import DistconvError
from distconv.jobs.training.options import nonnegative_int, positive_int
from distconv.jobs.verification.engine import launch
from distconv.whole_files import Folder

EXAMPLES = """\
examples:
  distconv verify soak
  distconv verify soak --faults 200 --ranks 4 --seed 1
"""

STEPS_PER_FAULT = 30
LIMIT_S = 300.0
"""Maximum seconds to the next step of a job, and from a fault to the end of the job."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify soak``."""
    parser.add_argument(
        "--faults", type=positive_int, default=20, help="number of faults to inject (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=positive_int, default=2, help="number of ranks of the training job (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=nonnegative_int, default=0, help="seed from which the faults are drawn (default: %(default)s)"
    )
    parser.add_argument(
        "--mpiexec", default=launch.mpiexec(), help="command that starts an MPI job (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Run both trainings and compare them; 1 if they differ. Starts jobs itself.

    Raises
    ------
    DistconvError
        If this is a job of several ranks itself, or the undisturbed run fails.
    """
    if MPI.COMM_WORLD.size > 1:
        raise DistconvError("verify soak starts jobs by itself; call it without mpiexec")
    with tempfile.TemporaryDirectory(prefix="distconv-soak-") as folder:
        alone, disturbed = (_Training(options, Path(folder) / name) for name in ("alone", "disturbed"))
        try:
            with alone.job("--overwrite") as job:
                if job.wait(alone.limit_s) != 0:
                    raise DistconvError(f"the undisturbed run failed\n{alone.said()}")
            done = _disturb(disturbed, options.faults, random.Random(options.seed))
        except _Wrong as wrong:
            print(f"WRONG: {wrong}\n{disturbed.said()}")
            return 1
        different = _differences(alone, disturbed)
    counted = ", ".join(f"{count} x {name}" for name, count in sorted(done.items()))
    print(f"{done.total()} faults on {options.ranks} ranks, seed {options.seed}: {counted}")
    print(f"DIFFERENT: {different}" if different else f"{alone.steps} steps: the same as undisturbed, bit for bit")
    return int(bool(different))


class _Wrong(Exception):
    """Failure of the check."""


class _Training:
    """A training in a folder, which one job after another resumes."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.out, self.steps, self._log = out, STEPS_PER_FAULT * options.faults, out.with_suffix(".log")
        words = f"train classify --data digits --model lenet5 --batch 32 --checkpoint-every 3 --steps {self.steps}"
        self._command = [*options.mpiexec.split(), "-n", str(options.ranks), sys.executable, "-m", "distconv"]
        self._command += [*words.split(), "--grid", f"h={options.ranks}", "--out", str(out)]
        self.limit_s = LIMIT_S + self.steps
        """Maximum seconds of a job without a fault, which are ``LIMIT_S`` and a second for each step."""

    @contextlib.contextmanager
    def job(self, *more: str) -> Iterator[_Job]:
        """Run a job of the training; all of its processes have ended afterwards."""
        with Folder(self._log.parent) as folder, folder.open_append(self._log.name) as log:
            job = _Job([*self._command, *more], log.fileno())
            try:
                yield job
            finally:
                job.end()

    def said(self) -> str:
        """Return the end of what its jobs have printed."""
        return self._log.read_text()[-3000:] if self._log.exists() else ""

    def checkpoints(self) -> list[Commit]:
        """Return the finished checkpoints, the one committed last at the end."""
        return commits(self.out / "checkpoints")

    def losses(self) -> list[tuple[int, float]]:
        """Return step and loss of each line of the metrics."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(line["step"], line["loss"]) for line in entries if "evaluation" not in line]


class _Job:
    """Ranks under a launcher."""

    def __init__(self, command: list[str], log: int) -> None:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._seen: set[int] = set()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks."""
        self._seen |= (pids := set(_below(self.process.pid)))
        return sorted(pid for pid in pids if "python" in Path(_program(pid)).name)

    def wait(self, limit_s: float) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise _Wrong(f"a job was still there after {limit_s:g} s") from None

    def end(self) -> None:
        """Kill what is left of it."""
        self.ranks()
        for pid in (self.process.pid, *self._seen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _below(pid: int) -> Iterator[int]:
    """Return the descendants of a process."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _below(child)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return ""


def _kill_launcher(job: _Job, draw: random.Random) -> None:
    job.process.kill()


def _kill_rank(job: _Job, draw: random.Random) -> None:
    os.kill(draw.choice(job.ranks()), signal.SIGKILL)


def _terminate(job: _Job, draw: random.Random) -> None:
    os.kill(draw.choice(job.ranks()), signal.SIGTERM)


def _pause(job: _Job, draw: random.Random) -> None:
    pid = draw.choice(job.ranks())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, 1.0))
    os.kill(pid, signal.SIGCONT)
    _kill_rank(job, draw)  # a pause alone would not end the job


def _starve(job: _Job, draw: random.Random) -> None:
    # Files cannot grow beyond 1,000 bytes. Python ignores the signal, so the next write of a checkpoint raises OSError.
    resource.prlimit(draw.choice(job.ranks()), resource.RLIMIT_FSIZE, (1000, 1000))


DAMAGE = "damage a checkpoint"

FAULTS: dict[str, Callable[[_Job, random.Random], None]] = {
    DAMAGE: _kill_rank,
    "kill a rank": _kill_rank,
    "kill the launcher": _kill_launcher,
    "pause a rank": _pause,
    "starve a rank": _starve,
    "terminate": _terminate,
}


def _disturb(training: _Training, faults: int, draw: random.Random) -> Counter[str]:
    """Run jobs with one fault each, then one that completes the training. Return the number of faults of each type."""
    done: Counter[str] = Counter()
    for number in range(faults):
        # Each kind occurs once in every len(FAULTS) jobs, in a new random order.
        if number % len(FAULTS) == 0:
            kinds = draw.sample(sorted(FAULTS), len(FAULTS))
        kind = kinds[number % len(FAULTS)]
        with training.job(*_start_options(training)) as job:
            if _reaches(training, job, draw.randint(1, STEPS_PER_FAULT)):
                with contextlib.suppress(IndexError, ProcessLookupError):  # the job has ended in the meantime
                    FAULTS[kind](job, draw)
                    done[kind] += 1
            if job.wait(LIMIT_S) == 0 and training.steps not in [each.step for each in training.checkpoints()]:
                raise _Wrong(f"a job ended with code 0 and was not done: {kind}")
        if kind == DAMAGE and len(training.checkpoints()) > 1:
            _damage(training, draw)
    with training.job(*_start_options(training)) as job:
        if job.wait(training.limit_s) != 0:
            raise _Wrong("the last job failed")
    return done


def _start_options(training: _Training) -> list[str]:
    return ["--resume", "whole"] if training.checkpoints() else ["--overwrite"]


def _reaches(training: _Training, job: _Job, steps: int) -> bool:
    """Wait until the job has taken so many steps. Return False if it ended before."""
    until, first = time.monotonic() + LIMIT_S, None
    while job.process.poll() is None:
        losses = training.losses() if job.ranks() else []
        newest = losses[-1][0] if losses else 0
        first = newest if first is None else min(first, newest)
        if newest >= first + steps:
            return True
        if time.monotonic() > until:
            raise _Wrong(f"a job took no step within {LIMIT_S:g} s")
        time.sleep(0.005)
    return False


def _damage(training: _Training, draw: random.Random) -> None:
    """Flip a bit of the newest checkpoint, or cut a file of it."""
    path = draw.choice(sorted(training.checkpoints()[-1].folder.iterdir()))
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        content[place] ^= 1 << draw.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)


def _differences(alone: _Training, disturbed: _Training) -> str:
    """Return the parts of the two final states that differ in any bit; empty if none do."""
    one, other = (checkpoint.load_newest(each.out / "checkpoints", MPI.COMM_SELF) for each in (alone, disturbed))
    if one is None or other is None:
        return "there is no checkpoint"
    wrong = [name for name in one.tensors if not torch.equal(one.tensors[name], other.tensors[name])]
    wrong += ["values"] if one.values != other.values else []
    wrong += ["losses"] if alone.losses() != disturbed.losses() else []
    return ", ".join(wrong)
