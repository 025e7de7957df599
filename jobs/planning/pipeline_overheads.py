"""What a pipelined step takes beside its layers and links, measured on the ranks that are there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import nn

from distconv.perfmodel.exploration.candidate_stages import Overheads
from distconv.perfmodel.machine.machine import Machine
from distconv.pipeline import Pipeline

MICROBATCHES = 32
ROUNDS = 7


def assumed_overheads(machine: Machine) -> Overheads:
    """Of a machine that is described, not measured: without progress behind computation messages occupy ranks."""
    return Overheads(blocking=not machine.overlap.halo)


def measured_overheads(machine: Machine, model: nn.Module, comm: MPI.Intracomm) -> Overheads:
    """Of this machine, with the optimizer's time for ``model``. Collective over ``comm``.

    Passes and messages are those of stages that compute next to nothing: one stage on each rank, and a chain over all.
    """
    alone = _seconds_of_a_pass(1, MPI.COMM_SELF)
    if comm.size == 1:
        return Overheads(alone, 0.0, _update_s_per_byte(model), not machine.overlap.halo)
    chain = _seconds_of_a_pass(comm.size, comm)
    seconds = comm.allreduce(alone, MPI.MAX), comm.allreduce(chain, MPI.MAX), _update_s_per_byte(model)
    # The slowest ranks of a longer chain, which are between two others, handle two messages in each pass.
    messages = 1 if comm.size == 2 else 2
    message_s = max(0.0, seconds[1] - seconds[0]) / messages
    return Overheads(seconds[0], message_s, comm.allreduce(seconds[2], MPI.MAX), not machine.overlap.halo)


def _seconds_of_a_pass(count: int, comm: MPI.Intracomm) -> float:
    """Of many micro-batches one after the other, so that what happens once per step does not count."""
    stages = [nn.Linear(1, 1) for _ in range(count)]
    for parameter in nn.ModuleList(stages).parameters():
        nn.init.ones_(parameter)  # alike on all ranks, whatever their seeds
    pipe = Pipeline(stages, comm, "gpipe", nn.functional.mse_loss, MICROBATCHES)
    x, target = torch.zeros(MICROBATCHES, 1), torch.zeros(MICROBATCHES, 1)
    many = _median(lambda: pipe.step(x, target))
    one = _median(lambda: pipe.step(x[:1], target[:1]))
    pipe.close()
    return max(0.0, many - one) / (2 * (MICROBATCHES - 1))


def _update_s_per_byte(model: nn.Module) -> float:
    parameters = [nn.Parameter(torch.zeros_like(parameter)) for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    return _median(optimizer.step) / sum(parameter.nbytes for parameter in parameters)


def _median(action: Callable[[], object]) -> float:
    action()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
