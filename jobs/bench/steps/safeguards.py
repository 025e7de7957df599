"""Measure the cost of checks between ranks and of checkpoints, relative to a training step.

A checkpoint is compared with raw files of the same size, written and flushed to the disk, interleaved in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.communication import agreement
from distconv.communication.gradient_reduction import BUCKET_BYTES
from distconv.communication.weight_digest import checksum_payload
from distconv.distribution import Distribution, default_axes
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.bench.messages import WARM_UP
from distconv.jobs.bench.steps import model_options
from distconv.jobs.planning.measured_steps import random_tensor
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.options import positive_int
from distconv.parallel import parallelize
from distconv.parameters.replicas import check_replicas
from distconv.placement import COMPARED_EVERY, scatter
from distconv.tensor import DistTensor

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench safeguards
  mpiexec -n 4 distconv bench safeguards --model mesh1k --size 512 --batch 1 --grid h=2,w=2 --directory /scratch
"""

STEP, DIGESTS, DURING_SAVE, RAW = "step", "digests of weights", "step during an asynchronous save", "raw file write"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench safeguards``."""
    model_options.add_arguments(parser, model="vgg16_bn", size=32, batch=16)
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder for the checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=11,
        help="interleaved repetitions of each measurement (default: %(default)s)",
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    grid = ProcessGrid(world, **(options.grid or {"h": world.size}))
    model = parallelize(model_options.make_model(options), grid)
    buckets = _buckets([p.local if isinstance(p, DistTensor) else p for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    shape = model_options.batch_shape(options)
    x, sample = random_tensor(Distribution(grid, default_axes("nchw", 4)), shape, model_options.CPU), torch.ones(shape)

    def step() -> None:
        optimizer.zero_grad()
        model_options.random_label_loss(options, model(x)).backward()
        optimizer.step()

    def digests() -> None:
        for bucket in buckets:
            checksum_payload(bucket, 0, world.size)

    def scatters(level: str) -> None:
        with _checking(level):
            for _ in range(COMPARED_EVERY):
                scatter(sample, grid)

    guards: dict[str, Callable[[], object]] = {
        STEP: step,
        DIGESTS: digests,
        f"{COMPARED_EVERY} scatters, DISTCONV_CHECK=off": lambda: scatters("off"),
        f"{COMPARED_EVERY} scatters, DISTCONV_CHECK=plan": lambda: scatters("plan"),
        "check_replicas": lambda: check_replicas(model, world),
    }
    with _shared_folder(world, options.directory) as folder:
        times = time_interleaved(world, timed_variants(guards), options.repeats, warm_up=WARM_UP)
        saves = _Saves(world, folder, model, optimizer)
        saving = timed_variants({RAW: saves.write_raw, "save_checkpoint": saves.save})
        written = time_interleaved(world, saving, options.repeats, warm_up=WARM_UP)
        overlapped = [saves.save_during(step) for _ in range(options.repeats)]
    stalls = {
        DURING_SAVE: [s for steps, _ in overlapped for s in steps],
        "stall of that save": [stall for _, stall in overlapped],
    }
    if world.rank == 0:
        print(report.heading(f"safeguards of {options.model}, {' x '.join(map(str, shape))}, {grid.describe()}"))
        print(report.time_table({**times, **stalls}, STEP, label="ms"))
        print(f"\nfiles of {saves.nbytes / 1e6:.1f} MB on rank 0\n{report.time_table(written, RAW, label='ms')}")
        off, plan = (statistics.median(times[name]) for name in list(guards)[2:4])
        share = (plan - off) / COMPARED_EVERY / statistics.median(times[STEP])
        print(f"comparing what is scattered takes {share:.2%} of a step for each tensor")
        figures = {"median_s": {**medians(times), **medians(stalls), **medians(written)}, "bytes": saves.nbytes}
        report.print_json(figures, options.json)
    return 0


def _buckets(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters in buckets of at least ``BUCKET_BYTES`` but for the last one, last layer first."""
    buckets: list[list[torch.Tensor]] = [[]]
    for parameter in reversed(parameters):
        if sum(each.nbytes for each in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


@contextlib.contextmanager
def _checking(level: str) -> Iterator[None]:
    before = agreement.level
    agreement.level = level
    try:
        yield
    finally:
        agreement.level = before


@contextlib.contextmanager
def _shared_folder(comm: MPI.Intracomm, directory: Path) -> Iterator[Path]:
    """Create a temporary folder on rank 0's disk, the same for all ranks. Collective.

    Raises
    ------
    DataError
        On all ranks, if it cannot be made.
    """

    def made() -> tempfile.TemporaryDirectory[str] | None:
        return tempfile.TemporaryDirectory(prefix="distconv-bench-", dir=directory) if comm.rank == 0 else None

    with agreement.try_on_all_ranks(comm, made, DataError) or contextlib.nullcontext() as path:
        yield Path(comm.bcast(path))
        comm.Barrier()  # rank 0 deletes the folder when no rank uses it any more


class _Saves:
    """Checkpoints of a training, and files of the same size."""

    def __init__(
        self, comm: MPI.Intracomm, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._comm, self._folder, self._model, self._optimizer = comm, folder, model, optimizer
        self._number = 0
        own = self.begin()
        own.finish(keep=1)
        self.nbytes = own.nbytes
        self._content = os.urandom(self.nbytes)

    def begin(self) -> checkpoint.AsyncSave:
        """Begin the next checkpoint. Collective."""
        self._number += 1
        tensors, values = checkpoint.capture_state(self._model, self._optimizer, self._comm)
        return checkpoint.AsyncSave(self._folder, self._number, tensors, values, self._comm)

    def save(self) -> None:
        """Write a checkpoint and wait for it. Collective."""
        self.begin().finish(keep=1)

    def write_raw(self) -> None:
        """Write this rank's bytes to a file on the disk."""
        path = self._folder / f"raw-{self._comm.rank}"
        with path.open("wb") as file:
            file.write(self._content)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()

    def save_during(self, step: Callable[[], None]) -> tuple[list[float], float]:
        """Write a checkpoint during steps. Collective.

        Return the seconds of each step until all ranks have written, and the seconds for which the save stops training.
        """
        self._comm.Barrier()
        start = time.perf_counter()
        saving = self.begin()
        stall, steps = time.perf_counter() - start, []
        while True:
            start = time.perf_counter()
            step()
            steps.append(time.perf_counter() - start)
            # Steps are collective, so all ranks take the same number of them: until the last one has written.
            if self._comm.allreduce(saving.is_written, MPI.LAND):
                break
        start = time.perf_counter()
        saving.finish(keep=1)
        return steps, stall + time.perf_counter() - start
