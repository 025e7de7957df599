"""Starts jobs of several ranks, one after the other, from a command that was called on one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def mpiexec() -> str:
    """How to start ranks: the environment's own mpiexec, or the one in the path."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def start(launcher: str, ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module arguments`` on ``ranks`` ranks, one thread each; returns its exit code."""
    command = [*launcher.split(), "-n", str(ranks), sys.executable, "-m", module, *arguments]
    print(f"== {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
