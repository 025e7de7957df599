"""Training steps on random samples, timed: what predictions are compared with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from mpi4py import MPI

from distconv.capture.captured import capture
from distconv.distribution import Distribution, default_axes
from distconv.jobs.timing import clocked, in_turns, timed
from distconv.jobs.training.model_factory import build_model
from distconv.parallel import parallelize
from distconv.pipeline import FAMILIES, Pipeline, Weights
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .options import on_first_ranks

WARM_UP = 2
FILLING, FULL = 4, 6
"""Steps of an asynchronous schedule that fill the pipeline, and those after them that are timed together."""

FIRST, TIMED = 1, 3
"""Steps of a synchronous schedule that bring its data into the caches, and those that are timed, as in a training."""


def random(dist: Distribution, shape: Sequence[int], device: torch.device) -> DistTensor:
    """Random numbers of a global ``shape``, of which each rank makes its own block.

    By a generator of its own: uneven blocks would leave torch's, of which dropout draws, in unlike states.
    """
    numbers = torch.Generator(device).manual_seed(dist.grid.rank)
    return DistTensor(torch.randn(dist.local_shape(shape), generator=numbers, device=device), dist, shape)


def mean_square(y: torch.Tensor) -> torch.Tensor:
    """The loss of these steps."""
    return y.pow(2).mean()


def training_step(model: torch.nn.Module, x: torch.Tensor, *, captured: bool = False) -> Callable[[], None]:
    """What takes a step: forward, mean-square loss, backward, which may be ``captured``, and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)

    def gradients(x: torch.Tensor) -> None:
        mean_square(model(x)).backward()

    take = capture(gradients, x) if captured else gradients

    def step() -> None:
        optimizer.zero_grad()
        take(x)
        optimizer.step()

    return step


def measured(
    options: argparse.Namespace, comm: MPI.Intracomm, ranks: int, plans: Mapping[str, Plan], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of ``options.rounds`` steps of each plan on the first ``ranks`` ranks. Collective.

    The other options are those of :func:`distconv.jobs.planning.options.add_network_arguments`.
    """
    working = MPI.Intracomm(comm.Split(int(comm.rank >= ranks)))

    def measure() -> dict[str, list[float]]:
        steps = {name: _planned_step(options, working, plan, device) for name, plan in plans.items()}
        variants = clocked(steps, device)

        def second(name: str) -> float:
            variants[name]()  # the plan before has filled the caches
            working.Barrier()
            return variants[name]()

        return in_turns(working, {name: partial(second, name) for name in steps}, options.rounds, warm_up=WARM_UP)

    seconds = on_first_ranks(comm, ranks, measure)
    working.Free()
    return seconds


def _planned_step(
    options: argparse.Namespace, comm: MPI.Intracomm, plan: Plan, device: torch.device
) -> Callable[[], None]:
    """A training step of the options as ``plan`` says, on random samples. Collective over ``comm``."""
    channels = options.input[0]
    model = build_model(options.model, comm, seed=0, in_channels=channels, classes=options.classes, width=options.width)
    dist = Distribution(plan.input_grid(model, comm), default_axes(None, 1 + len(options.input)))
    x = random(dist, (options.batch, *options.input), device)
    return training_step(parallelize(model.to(device), plan, comm=comm), x)


def pipeline_step_s(pipe: Pipeline, schedule: str, x: torch.Tensor, target: torch.Tensor, comm: MPI.Intracomm) -> float:
    """Seconds of a step of a pipeline, after one that has its data in the caches and its pipeline full. Collective."""
    endless = FAMILIES[schedule].weights is not Weights.SYNCHRONOUS
    before, count = (FILLING, FULL) if endless else (FIRST, TIMED)

    def steps(number: int) -> None:
        for _ in range(number):
            pipe.step(x, target)

    steps(before)
    seconds = timed(comm, torch.device("cpu"), lambda: steps(count)) / count
    pipe.drain()
    return seconds
