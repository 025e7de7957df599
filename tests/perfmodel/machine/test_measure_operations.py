"""Measured times of operations: every phase of every operation, under the key by which it is looked up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.evaluation import Model
from distconv.perfmodel.cost.operation_work import PHASES, local_call, work
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.measure_operations import calls_of, measure, measure_exchange, measure_roofline
from distconv.perfmodel.strategy.candidates import candidates
from tests.perfmodel.networks import machine

CPU = torch.device("cpu")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, 1, 1, 1, 4)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)), inplace=True)
        y = torch.cat([F.max_pool2d(self.grouped(y), 2), y[:, :, ::2, ::2]], 1)
        return self.head(y[:, :8].mean((2, 3)))


@pytest.mark.ranks(1, 2)
def test_every_phase_of_every_operation_is_measured_for_every_candidate(comm):
    graph = trace(Network(), (4, 4, 8, 8))
    model = Model.of(graph, machine(), 2, Settings())
    options = candidates(graph, 2)
    table = measure(calls_of(graph, options, 2, model.per_node), comm, CPU)
    for op in graph.operations:
        for candidate in options[op.layer]:
            call = local_call(op, model.parts(candidate))
            for phase in PHASES:
                if work(call, phase).kernels:
                    assert table[f"{call.key} {phase}"] > 0, (op.name, candidate, phase)
    assert comm.allgather(table) == [table] * comm.size


@pytest.mark.ranks(1, 2)
def test_costs_are_taken_from_the_table(comm):
    graph = trace(Network(), (4, 4, 8, 8))
    options = {name: [{"n": 2}] for name in graph.deciding}
    table = measure(calls_of(graph, options, 2, 2), comm, CPU)
    here = machine()
    here = dataclasses.replace(here, compute=(dataclasses.replace(here.compute[0], table=table),))
    model = Model.of(graph, here, 2, Settings())
    op = graph.operations[0]
    cost = model.costs.operation(op, model.parts({"n": 2}))
    key = local_call(op, model.parts({"n": 2})).key
    assert (cost.fp, cost.bpw) == (table[f"{key} forward"], table[f"{key} weight"])


class Explicit(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x) * torch.ones(4, 4, 8, 8)


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_run_by_itself_is_left_out(comm):
    """A constant of the global extents meets a block."""
    graph = trace(Explicit(), (4, 4, 8, 8))
    table = measure(calls_of(graph, {"conv": [{"h": 2}]}, 2, 2), comm, CPU)
    assert any(key.startswith("conv2d") for key in table)
    assert not any(key.startswith("mul") for key in table)


@pytest.mark.ranks(1, 2)
def test_a_roofline_is_positive_and_finite(comm):
    found = measure_roofline(comm, CPU)
    assert 1e8 < found.flops_per_s < 1e14 and 1e7 < found.bytes_per_s < 1e13 and 1e-8 < found.kernel_s < 1e-2


@pytest.mark.ranks(2)
def test_the_fixed_cost_of_an_exchange_is_a_short_time(comm):
    assert 0 <= measure_exchange(comm, CPU) < 0.1
