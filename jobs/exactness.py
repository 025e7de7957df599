"""Compare training over a grid with plain torch on one process: losses of every step and the final weights.

    mpiexec -n 4 python -m distconv.jobs.exactness --grid n=2,h=2 --model mesh1k --size 50x36

Both take the same float64 steps on the same samples; the reference uses no distributed tensor at all. How far round-off
alone carries is shown by plain torch that sees the samples of each batch in reverse order.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.grid import ProcessGrid, parse_grid

from .mesh_samples import MeshSamples
from .mesh_training import Settings, Trainer
from .synthetic_samples import write_synthetic

LOSS_LIMIT, WEIGHT_LIMIT = 1e-10, 1e-9
RATE = 3e-4
"""At a few times this rate mesh1k is chaotic on small samples: its last batch norms see one cell of each of four
samples, and 20 steps then make 1e-8 of any round-off, also that of another order of one process's own sums.
"""
POLL_S = 0.01


@dataclass(frozen=True)
class Run:
    """Losses of all steps, and the final parameters and buffers by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of a loss, and of a weight relative to the largest in its tensor."""

    loss: float
    weight: float

    @property
    def exact(self) -> bool:
        """Within the limits that count as equal: accumulation in another order, nothing more."""
        return self.loss <= LOSS_LIMIT and self.weight <= WEIGHT_LIMIT


def train(
    settings: Settings,
    path: str | os.PathLike[str],
    grid: ProcessGrid,
    *,
    plain: bool = False,
    reverse: bool = False,
) -> Run:
    """Take all steps; with ``plain``, on a grid of one rank, hand ordinary tensors to the ordinary model.

    ``reverse`` turns the order of the samples in each batch, which changes nothing but the order of sums.
    """
    samples = MeshSamples(path, grid.world)
    trainer = Trainer(settings, samples, grid)
    losses = []
    for batch in trainer.batches():
        inputs, labels = (tensor.local if plain else tensor for tensor in batch.tensors)
        if reverse:
            inputs, labels = inputs.flip(0), labels.flip(0)
        losses.append(trainer.step(inputs, labels))
    samples.close()
    return Run(losses, {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()})


def reference(settings: Settings, path: str | os.PathLike[str], comm: MPI.Intracomm, *, reverse: bool = False) -> Run:
    """The same steps with plain torch, on rank 0 alone; the other ranks sleep meanwhile. Collective."""
    own = ProcessGrid(MPI.COMM_SELF)
    run = train(settings, path, own, plain=True, reverse=reverse) if comm.rank == 0 else None
    wait_asleep(comm)
    found: Run = comm.bcast(run, root=0)
    return found


def wait_asleep(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the cores to the ranks still at work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(POLL_S)


def difference(run: Run, reference: Run) -> Difference:
    """How far two runs are apart."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))
    weight = 0.0
    for name, expected in reference.weights.items():
        apart = (run.weights[name].double() - expected.double()).abs().max()
        weight = max(weight, float(apart / expected.double().abs().max().clamp_min(1e-300)) if apart else 0.0)
    return Difference(loss, weight)


def main(arguments: list[str] | None = None) -> int:
    """Print the differences; 0 if they are within the limits, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="n=1")
    parser.add_argument("--model", default="unet", choices=("unet", "mesh1k", "mesh2k"))
    parser.add_argument("--size", default="64x64")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"))
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    height, width = map(int, options.size.split("x"))
    settings = Settings(
        options.model,
        options.width,
        batch=4,
        steps=options.steps,
        optimizer=options.optimizer,
        dtype="float64",
        lr=options.lr,
    )
    with tempfile.TemporaryDirectory() as own:
        path = Path(comm.bcast(own)) / "synthetic.h5"
        if comm.rank == 0:
            write_synthetic(path, (height, width))
        comm.Barrier()
        expected = reference(settings, path, comm)
        yardstick = difference(reference(settings, path, comm, reverse=True), expected)
        found = difference(train(settings, path, ProcessGrid(comm, **parse_grid(options.grid))), expected)
        comm.Barrier()
    if comm.rank == 0:
        print(
            f"{options.model} width {options.width}, {options.size}, batch 4, {options.steps} steps of "
            f"{options.optimizer}, float64, "
            f"grid {options.grid}: losses differ by {found.loss:.1e}, weights by {found.weight:.1e}: "
            f"{'equal' if found.exact else 'NOT EQUAL'} (plain torch with each batch reversed: {yardstick.loss:.1e}, "
            f"{yardstick.weight:.1e})"
        )
    return 0 if found.exact else 1


if __name__ == "__main__":
    sys.exit(main())
