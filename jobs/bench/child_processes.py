"""Runs benchmarks in processes outside this job, and measures the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distconv.errors import DistconvError
from distconv.process.launchers import environment_without_launcher

MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """Memory of one process in bytes."""

    before: int
    """Peak resident memory before the model was built, of the interpreter and its libraries."""
    peak: int
    """Peak resident memory of the process."""
    step_s: float
    """Seconds of the measured step."""

    @property
    def used(self) -> int:
        """Memory of the model (weights, gradients, activations, buffers of the operators and of MPI)."""
        return self.peak - self.before


def run_in_new_process(words: Sequence[str]) -> Peak:
    """Run ``distconv bench`` with these arguments in a process outside this job, and return the peak it prints.

    Raises
    ------
    DistconvError
        If the process fails.
    """
    # Without the launcher's variables, by which MPI in the child would join this job.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **environment_without_launcher()}
    command = [sys.executable, "-m", "distconv", "bench", *words]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        last = finished.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DistconvError(f"the process that runs one rank failed (exit code {finished.returncode}): {last[0]}")
    return Peak(**json.loads(finished.stdout.splitlines()[-1]))


def measure_first_step(make: Callable[[], Callable[[], object]]) -> Peak:
    """Measure memory and time of the first call of the function that ``make`` returns, and its construction."""
    _peak_bytes_since_last()  # resets the peak, which imports have raised
    before = _peak_bytes_since_last()  # what is resident
    step = make()
    _peak_bytes_since_last()
    start = time.perf_counter()
    step()
    return Peak(before, _peak_bytes_since_last(), time.perf_counter() - start)


def _peak_bytes_since_last() -> int:
    """Return the peak resident memory of this process since the last call.

    The peak of ``getrusage`` also includes the parent process, imports and preparation, which can exceed a small step.
    """
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the memory that is resident now
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
