"""Time the all-reduce of a network's gradients during backward, and compare it with a single raw allreduce.

The backward pass only returns each parameter's gradient, last layer first. The time above that of one in-place
allreduce of all bytes is spent in packing, in the latency of the messages and in bookkeeping.

Source: Dryden et al. 2019, III-A.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication import gradient_reduction
from distconv.jobs.bench import report
from distconv.jobs.bench.messages import WARM_UP
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.options import positive_int
from distconv.layers.models import resnet50

RAW = "Allreduce"

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench allreduce
  mpiexec -n 4 distconv bench allreduce --width 16 --repeats 5 --json allreduce.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench allreduce``."""
    parser.add_argument(
        "--width", type=positive_int, default=64, help="channels of ResNet-50's first layer (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=20, help="all-reduces per result (default: %(default)s)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    world = MPI.COMM_WORLD
    torch.manual_seed(0)
    named = dict(resnet50(width=options.width).named_parameters())
    parameters = list(named.values())
    for name, parameter in named.items():
        gradient_reduction.defer_grad_reduction(parameter, name)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    whole = torch.zeros(nbytes // 4)
    shares = [torch.zeros_like(parameter) for parameter in parameters]
    start = torch.zeros((), requires_grad=True)

    def summed() -> None:
        for parameter in parameters:
            parameter.grad = None
        _ReturnGradients.apply(start, world, parameters, shares).backward()  # type: ignore[no-untyped-call]

    actions = {RAW: lambda: world.Allreduce(MPI.IN_PLACE, whole.numpy()), "gradients": summed}
    times = time_interleaved(world, timed_variants(actions), options.repeats, warm_up=WARM_UP)
    if world.rank == 0:
        print(report.heading(f"sum of {len(parameters)} gradients, {nbytes / 1e6:.1f} MB, float32, {world.size} ranks"))
        print(report.time_table(times, RAW, label="ms"))
        report.print_json({"median_s": medians(times)}, options.json)
    return 0


class _ReturnGradients(torch.autograd.Function):
    """The identity. Its backward pass enqueues this rank's contribution to each parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Any, parameters: Any, shares: Any) -> torch.Tensor:
        ctx.comm, ctx.parameters, ctx.shares = comm, parameters, shares
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        for parameter, share in zip(reversed(ctx.parameters), reversed(ctx.shares), strict=True):
            gradient_reduction.enqueue_contribution(parameter, share, ctx.comm, uniquely_owned=True)
        return gradient, None, None, None
