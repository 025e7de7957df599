"""Measure memory and time of a training with sharded weights, with full weights, and with FSDP2.

    python -m tests.jobs.bench.steps.sharded_weights resnet50:2 unet3d:2 resnet50:4 unet3d:4

Each word is a network and a number of ranks, over which samples are split. Every variant is a job of its own, so that
its peak memory is measured, and the variants take turns. FSDP2 is ``fully_shard`` over gloo, of each block and of the
model. The table has the bytes of parameters, gradients and Adam's state of the rank that has most, the growth of the
process up to its peak (VmHWM), and the median time of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.jobs.timing import time_interleaved, timed_variants
from distconv.jobs.training.report import peak_memory_bytes
from distconv.layers.models import resnet50, unet3d
from distconv.layers.models.resnet import Bottleneck
from distconv.process.launchers import environment_without_launcher
from distconv.tensor import DistTensor

VARIANTS = ("full weights", "sharded", "FSDP2")
WARM_UP, STEPS, TURNS = 4, 7, 2

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet50": (resnet50, (8, 3, 128, 128)),
    "unet3d": (lambda: unet3d(72), (4, 1, 16, 16, 16)),
}
"""Networks, and the shapes of their mini-batches."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DistTensor):
        return tensor.local
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    blocks = [m for m in model.modules() if isinstance(m, Bottleneck) or (isinstance(m, nn.Sequential) and len(m) > 1)]
    for block in blocks:
        if not any(block is not other and block in other.modules() for other in blocks):
            fully_shard(block)
    fully_shard(model)
    return model


def measure(name: str, variant: str, file: str) -> None:
    """Train a network and print bytes, peak and time as JSON. Collective."""
    world = MPI.COMM_WORLD
    make, shape = NETWORKS[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=world.rank, world_size=world.size)
    grid = dc.ProcessGrid(n=world.size)
    torch.manual_seed(0)
    model = make()
    full = torch.randn(shape)
    if variant == "FSDP2":
        model = _fsdp(model)
        x: torch.Tensor = full.chunk(world.size)[world.rank]
    else:
        model = dc.parallelize(model, grid, shard_weights=variant == "sharded", batch_norm="local")
        x = dc.scatter(full, grid)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    times = time_interleaved(world, timed_variants({variant: step}), STEPS, warm_up=WARM_UP)[variant]
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = (_nbytes(parameters), _nbytes([parameter.grad for parameter in parameters]), _nbytes(states))
    row = [*(max(column) for column in zip(*world.allgather(held), strict=True))]
    row.append(max(world.allgather(peak_memory_bytes())))
    if world.rank == 0:
        print(json.dumps([*row, statistics.median(times)]), flush=True)
    dist.destroy_process_group()


def main(words: list[str]) -> None:
    """Measure and print a table."""
    print("| network, ranks | variant | parameters | gradients | Adam | peak of a rank, MiB | ms per step |")
    print("|---|---|---|---|---|---|---|")
    for word in words:
        name, ranks = word.split(":")
        found: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(TURNS):
            for variant in VARIANTS:
                with tempfile.TemporaryDirectory(prefix="distconv-") as folder:
                    own = ("-m", "mpi4py", "-m", __spec__.name, "--measure", name, variant, f"{folder}/meeting")
                    ended = subprocess.run(
                        ["mpiexec", "-n", ranks, sys.executable, *own],
                        env={**environment_without_launcher(), "OMP_NUM_THREADS": "1"} | dict(os.environ.items()),
                        capture_output=True, text=True, timeout=600,
                    )  # fmt: skip
                if ended.returncode:
                    raise SystemExit(ended.stderr)
                found[variant].append(json.loads(ended.stdout.splitlines()[-1]))
        for variant, rows in found.items():
            sizes = [max(row[k] for row in rows) / 2**20 for k in range(4)]
            times = [1e3 * row[4] for row in rows]
            figures = " | ".join(f"{size:.1f}" for size in sizes[:3])
            print(
                f"| {word} | {variant} | {figures} | {sizes[3]:.0f} | {', '.join(f'{t:.0f}' for t in times)} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(*sys.argv[2:])
    else:
        main(sys.argv[1:])
