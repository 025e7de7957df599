"""Timed training steps on random samples, with which predictions are compared.

Benchmarks and ``distconv verify`` use it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from mpi4py import MPI

from distconv.capture.captured import capture
from distconv.distribution import Distribution, default_axes
from distconv.jobs.timing import time_action, time_interleaved, timed_variants
from distconv.jobs.training.model_factory import build_model
from distconv.memory_format import convert_weights, named_format
from distconv.parallel import parallelize
from distconv.perfmodel.machine.step_mode import MODES, StepMode
from distconv.pipeline import FAMILIES, Pipeline, Weights
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .options import run_on_first_ranks

WARM_UP = 2
FILLING, FULL = 4, 6
"""Steps of an asynchronous schedule that fill the pipeline, and later ones that are timed as one run."""

FIRST, TIMED = 1, 3
"""Warm-up steps and timed steps of a synchronous schedule."""


def random_tensor(dist: Distribution, shape: Sequence[int], device: torch.device) -> DistTensor:
    """Return a distributed tensor of normal random numbers, whose blocks ranks generate independently.

    A separate generator is used. With torch's default one, blocks of different sizes would leave its state different on
    each rank, and dropout draws from that state.

    Parameters
    ----------
    dist : Distribution
    shape : sequence of int
        Global shape.
    device : torch.device

    Returns
    -------
    DistTensor
        The values depend on the grid.
    """
    coordinates = {axis: dist.grid.coordinate(axis, dist.grid.rank) for axis in dist.split_axes}
    # Replicas of a block draw the same numbers, as a replicated tensor requires.
    numbers = torch.Generator(device).manual_seed(dist.grid.rank_of(coordinates))
    return DistTensor(torch.randn(dist.local_shape(shape), generator=numbers, device=device), dist, shape)


def mean_square_loss(y: torch.Tensor) -> torch.Tensor:
    """Return the mean square, the loss of the timed steps."""
    return y.pow(2).mean()


def training_step(
    model: torch.nn.Module, x: torch.Tensor, *, captured: bool = False, compiled: bool = False, bfloat16: bool = False
) -> Callable[[], None]:
    """Return a function that takes a step: forward, mean-square loss, backward, SGD with momentum.

    Parameters
    ----------
    model : torch.nn.Module
    x : torch.Tensor
        Input (N, C, ...) of every step.
    captured : bool
        True captures forward and backward. Collective in that case.
    compiled : bool
        True compiles model and loss by ``torch.compile``.
    bfloat16 : bool
        True computes model and loss under ``torch.autocast``.

    Returns
    -------
    callable
        Takes one step. Collective if the model is distributed.
    """
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16) if bfloat16 else nullcontext():
            return mean_square_loss(model(x))

    evaluate = torch.compile(loss) if compiled else loss

    def gradients(x: torch.Tensor) -> None:
        evaluate(x).backward()

    take = capture(gradients, x) if captured else gradients

    def step() -> None:
        optimizer.zero_grad()
        take(x)
        optimizer.step()

    return step


def time_plans(
    options: argparse.Namespace,
    comm: MPI.Intracomm,
    ranks: int,
    plans: Mapping[str, Plan],
    device: torch.device,
    *,
    mode: StepMode = MODES[0],
) -> dict[str, list[float]]:
    """Time steps of several plans on the first ranks. Collective: call on every rank of ``comm``.

    Parameters
    ----------
    options : argparse.Namespace
        Options of :func:`distconv.jobs.planning.options.add_network_arguments`, and ``rounds``.
    comm : mpi4py.MPI.Intracomm
    ranks : int
        Number of ranks that work.
    plans : mapping
        Plans by name, for ``ranks`` ranks.
    device : torch.device
    mode : StepMode
        Memory format of input and weights, and eager or captured steps.

    Returns
    -------
    dict
        Seconds of ``options.rounds`` steps for each plan.
    """
    # The other ranks form a group, too, which has no work: Split and Free are collective.
    working = MPI.Intracomm(comm.Split(int(comm.rank >= ranks)))

    def measure() -> dict[str, list[float]]:
        steps = {name: _planned_step(options, working, plan, device, mode) for name, plan in plans.items()}
        variants = timed_variants(steps, device)

        def second(name: str) -> float:
            variants[name]()  # the caches hold data of the previous plan
            working.Barrier()
            return variants[name]()

        return time_interleaved(
            working, {name: partial(second, name) for name in steps}, options.rounds, warm_up=WARM_UP
        )

    seconds = run_on_first_ranks(comm, ranks, measure)
    working.Free()
    return seconds


def _planned_step(
    options: argparse.Namespace, comm: MPI.Intracomm, plan: Plan, device: torch.device, mode: StepMode
) -> Callable[[], None]:
    """Return a training step of a plan on random samples. Collective over ``comm``."""
    channels = options.input[0]
    model = build_model(options.model, comm, seed=0, in_channels=channels, classes=options.classes, width=options.width)
    dist = Distribution(plan.input_grid(model, comm), default_axes(None, 1 + len(options.input)))
    x: torch.Tensor = random_tensor(dist, (options.batch, *options.input), device)
    convert_weights(model, mode.memory_format)
    x = x.contiguous(memory_format=named_format(mode.memory_format, x.dim()))
    return training_step(parallelize(model.to(device), plan, comm=comm), x, captured=mode.captured)


def pipeline_step_s(pipe: Pipeline, schedule: str, x: torch.Tensor, target: torch.Tensor, comm: MPI.Intracomm) -> float:
    """Time a pipeline's step after warm-up steps. Collective: call on every rank of ``comm``.

    Asynchronous schedules fill the pipeline first.

    Parameters
    ----------
    pipe : Pipeline
    schedule : str
        Name of the schedule of ``pipe``.
    x, target : torch.Tensor
        A mini-batch.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    float
        Seconds per step.
    """
    endless = FAMILIES[schedule].weights is not Weights.SYNCHRONOUS
    before, count = (FILLING, FULL) if endless else (FIRST, TIMED)

    def steps(number: int) -> None:
        for _ in range(number):
            pipe.step(x, target)

    steps(before)
    seconds = time_action(comm, torch.device("cpu"), lambda: steps(count)) / count
    pipe.drain()  # not timed: the next measurement fills an empty pipeline
    return seconds
