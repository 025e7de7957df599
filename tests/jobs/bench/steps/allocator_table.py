"""Measure memory and time of a training with each allocator.

``python -m tests.jobs.bench.steps.allocator_table vnet:2`` trains the network VNet on 2 ranks. Runs with different
allocators are interleaved, each in its own job. An installed allocator is loaded as ``distconv run`` loads it. The
table has the largest peak memory of a rank (VmHWM), the median seconds of all steps but the first, and their median
processor time, which depends little on other work of the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.jobs.training.report import peak_memory_bytes
from distconv.process.launchers import environment_without_launcher
from distconv.process.memory import allocator, caching_allocators
from tests.jobs.bench.steps import memory_networks as networks

ALWAYS = {
    "left alone": {"DISTCONV_MALLOC": "0"},
    "as a script has it": {"DISTCONV_MALLOC": "1"},
}

Step = Callable[[], object]


def _training(model: nn.Module, axis: str, *shape: int, dtype: torch.dtype = torch.float32) -> Step:
    grid = dc.ProcessGrid(MPI.COMM_WORLD, **{axis: MPI.COMM_WORLD.size})
    model = dc.parallelize(model.to(dtype), grid)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    x = dc.scatter(torch.randn(shape, dtype=dtype), grid)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(name: str) -> None:
    """Train a network and print its peak and its times. Collective."""
    torch.manual_seed(0)
    world = MPI.COMM_WORLD
    step, times = _training(getattr(networks, name)(), "d", 1, 1, 32, 32, 32, dtype=torch.float64), []
    for _ in range(3):
        world.Barrier()
        started, used = time.perf_counter(), time.process_time()
        step()
        world.Barrier()
        times.append((time.perf_counter() - started, time.process_time() - used))
    peak = max(world.allgather(peak_memory_bytes())) / 2**20
    seconds, processor = (statistics.median(each) for each in zip(*times[1:], strict=True))
    if world.rank == 0:
        print(json.dumps([peak, seconds, processor]), flush=True)


def _ways() -> dict[str, dict[str, str]]:
    found = filter(caching_allocators.find_installed, caching_allocators.FILES)
    return ALWAYS | {name: allocator.environment(name) | {"DISTCONV_MALLOC": name} for name in found}


def main(words: list[str], turns: int) -> None:
    """Measure all ways in turns and print the table."""
    for word in words:
        name, ranks = word.split(":")
        found: dict[str, list[list[float]]] = {}
        for _ in range(turns):
            for way, variables in _ways().items():
                command = [
                    "mpiexec",
                    "-n",
                    ranks,
                    sys.executable,
                    "-m",
                    "mpi4py",
                    "-m",
                    __spec__.name,
                    "--measure",
                    name,
                ]
                ended = subprocess.run(
                    command,
                    env={**environment_without_launcher(), **variables},
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
                if ended.returncode:
                    raise SystemExit(ended.stderr)
                found.setdefault(way, []).append(json.loads(ended.stdout.splitlines()[-1]))
        alone = max(peak for peak, *_ in found["left alone"])
        for way, rows in found.items():
            peak = max(row[0] for row in rows)
            seconds, processor = (statistics.median(row[k] for row in rows) for k in (1, 2))
            print(f"| {word} | {way} | {peak:.0f} | {peak / alone:.2f} | {seconds:.2f} | {processor:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(sys.argv[2])
    else:
        print("| | | MiB | of left alone | s | processor s |\n|---|---|---|---|---|---|")
        main(sys.argv[1:], int(os.environ.get("TURNS", "1")))
