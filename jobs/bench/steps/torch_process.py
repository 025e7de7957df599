"""Plain torch as the reference of benchmarks: child processes that never load distconv.

The fastest way to run plain torch depends on the network and the machine. So it runs with default settings, with glibc
set to keep freed memory, with each installed allocator, in both memory formats, and compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import NamedTuple

from distconv.jobs.bench.steps import torch_step
from distconv.process.launchers import environment_without_launcher
from distconv.process.memory import allocator, caching_allocators


def add_compile_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--no-compile`` of benchmarks that compare with ``torch.compile``."""
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="do not compare with torch.compile, which needs a compiler and a minute",
    )


class TorchVariant(NamedTuple):
    """A way to run plain torch."""

    threads: int
    allocator: str
    """Kind of :mod:`distconv.process.memory.allocator`."""
    memory_format: str
    mode: str = "eager"
    """``eager`` or ``compiled``."""


_ALLOCATOR = ("MALLOC_", "MIMALLOC_", "THP_", "LD_PRELOAD")
"""Prefixes of environment variables that select an allocator. The child does not inherit them."""


class TorchProcess:
    """Plain torch in a child process, which takes steps on request.

    Parameters
    ----------
    variant : TorchVariant
        How torch is run.
    step : StepOptions
        The step. The memory format is that of ``variant``.
    """

    def __init__(self, variant: TorchVariant, step: torch_step.StepOptions) -> None:
        env = {name: value for name, value in environment_without_launcher().items() if not name.startswith(_ALLOCATOR)}
        env |= {"OMP_NUM_THREADS": str(variant.threads)} | allocator.environment(variant.allocator)
        step = step._replace(memory_format=variant.memory_format)
        words = (json.dumps(step._asdict()), str(variant.threads), variant.mode)
        self._process = subprocess.Popen(
            [sys.executable, torch_step.__file__, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip

    def steps(self, count: int) -> float:
        """Return the seconds of a step, the median of ``count``."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        times: list[float] = json.loads(self._process.stdout.readline())
        return statistics.median(times)

    def close(self) -> None:
        """End the child."""
        self._process.communicate("0\n")


def torch_variants(threads: int, ranks: int, *, compiled: bool) -> dict[str, TorchVariant]:
    """Return the ways to run plain torch with the threads of all ranks, and last two with those of one rank.

    Parameters
    ----------
    threads : int
        Threads of a rank.
    ranks : int
        Number of ranks.
    compiled : bool
        True includes compiled steps.

    Returns
    -------
    dict of str to TorchVariant
    """
    total = min(threads * ranks, len(os.sched_getaffinity(0)))  # more threads than cores would slow it down
    libraries = filter(caching_allocators.find_installed, caching_allocators.FILES)
    names = {"as shipped": "system", "heap": "heap"} | {name: name for name in libraries}
    ways = {f"torch, {total} threads, {name}": TorchVariant(total, kind, "contiguous") for name, kind in names.items()}
    for name, kind in [*names.items()][1:]:  # the shipped allocator is not the fastest
        of_all = f"torch, {total} threads, {name}"
        ways[f"{of_all}, channels_last"] = TorchVariant(total, kind, "channels_last")
        if compiled:
            ways[f"{of_all}, compiled"] = TorchVariant(total, kind, "contiguous", "compiled")
            ways[f"{of_all}, channels_last, compiled"] = TorchVariant(total, kind, "channels_last", "compiled")
    of_one = f"torch, {threads} thread(s), {allocator.kind}"
    return ways | {
        of_one: TorchVariant(threads, allocator.kind, "contiguous"),
        f"{of_one}, channels_last": TorchVariant(threads, allocator.kind, "channels_last"),
    }
