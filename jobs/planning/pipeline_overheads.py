"""Overheads of a pipelined step in addition to layers and links, measured on the ranks of this job.

Called by ``distconv explore``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from mpi4py import MPI
from torch import nn

from distconv.perfmodel.exploration.candidate_stages import Overheads
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine
from distconv.pipeline import Pipeline
from distconv.pipeline.schedules.actions import Kind

MICROBATCHES = 32
ROUNDS = 7


def assumed_overheads(machine: Machine) -> Overheads:
    """Return the overheads of a machine that is described but not measured.

    Messages occupy ranks unless the machine overlaps them with computation.
    """
    return Overheads(blocking=not machine.overlap.halo)


def measured_overheads(machine: Machine, model: nn.Module, samples: torch.Tensor, comm: MPI.Intracomm) -> Overheads:
    """Measure the overheads of this machine. Collective: call on every rank of ``comm``.

    Passes and messages are measured on stages with almost no computation: one stage on each rank, and a chain over all
    ranks.

    Parameters
    ----------
    machine : Machine
        Measured machine, whose links are subtracted.
    model : torch.nn.Module
        Model whose optimizer step and gradient all-reduce between replicas are measured.
    samples : torch.Tensor
        A few samples (N, C, ...) for each rank.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    Overheads
        Times of passes, messages and the optimizer are those of the slowest rank.
    """
    alone, update = _pass_s(1, MPI.COMM_SELF), _update_s_per_byte(model)
    if comm.size == 1:
        return Overheads(alone, 0.0, update, not machine.overlap.halo)
    chain = _pass_s(comm.size, comm)
    alone, chain, update = (comm.allreduce(seconds, MPI.MAX) for seconds in (alone, chain, update))
    # In a longer chain, the slowest ranks are those between two other ranks. They handle two messages in each pass.
    messages = 1 if comm.size == 2 else 2
    message_s = max(0.0, chain - alone) / messages
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    group = RankGroup(comm.size, min(comm.size, machine.ranks_per_node))
    predicted = machine.allreduce(group, parameters) + update * parameters
    join_s = max(0.0, _joined_update_s(model, samples, comm) - predicted)
    return Overheads(alone, message_s, update, not machine.overlap.halo, join_s)


def _pass_s(count: int, comm: MPI.Intracomm) -> float:
    """Return the seconds of a pass: a difference of step times, which cancels costs per step. Collective."""
    stages = [nn.Linear(1, 1) for _ in range(count)]
    for parameter in nn.ModuleList(stages).parameters():
        nn.init.ones_(parameter)  # identical on all ranks, independent of their seeds
    pipe = Pipeline(stages, comm, "gpipe", nn.functional.mse_loss, MICROBATCHES)
    x, target = torch.zeros(MICROBATCHES, 1), torch.zeros(MICROBATCHES, 1)
    many = _median(lambda: pipe.step(x, target))
    one = _median(lambda: pipe.step(x[:1], target[:1]))
    pipe.close()
    return max(0.0, many - one) / (2 * (MICROBATCHES - 1))


def _joined_update_s(model: nn.Module, samples: torch.Tensor, comm: MPI.Intracomm) -> float:
    """Return the seconds of an update with a replica per rank. Collective.

    It is the minimum over the ranks: the last rank that arrives waits for no other.
    """
    x = samples.repeat(comm.size, *(1,) * (samples.dim() - 1))
    # The rate 0 leaves the weights of ``model`` unchanged.
    optimizer = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    pipe = Pipeline([model], comm, "gpipe", lambda output, _: output.pow(2).mean(), comm.size, comm.size, optimizer)
    seconds = []
    for _ in range(1 + ROUNDS):
        with pipe.traced() as timeline:
            pipe.step(x, torch.zeros(len(x)))
        seconds.append(min(span.end - span.start for span in timeline().spans if span.action.kind is Kind.UPDATE))
    pipe.close()
    return statistics.median(seconds[1:])  # the first update creates the optimizer's state


def _update_s_per_byte(model: nn.Module) -> float:
    """Return the seconds of an optimizer step per byte of the weights, measured on copies of them."""
    parameters = [nn.Parameter(torch.zeros_like(parameter)) for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    return _median(optimizer.step) / sum(parameter.nbytes for parameter in parameters)


def _median(action: Callable[[], object]) -> float:
    action()  # warm-up
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
