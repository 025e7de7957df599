"""Measured times of operations: every phase of every operation, under the key by which it is looked up."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.utils._pytree import tree_leaves

import distconv as dc
from distconv.communication import gradient_reduction
from distconv.communication.transport import count_traffic
from distconv.kernels.convolution import Piece, assemble_input, crop
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import StepModel
from distconv.perfmodel.cost.operation_work import PHASES, local_call, work
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.step_mode import MODES, StepMode
from distconv.perfmodel.profiles import measure_operations
from distconv.perfmodel.profiles.measure_operations import (
    EAGER,
    _backward,
    _BlockConvolution,
    _CallCopy,
    _Runs,
    _runs,
    _time_runs,
    calls_of,
    measure,
    measure_exchange,
    measure_roofline,
    measure_sum,
)
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
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_phase_of_every_operation_is_measured_for_every_candidate(comm, mode):
    graph = trace(Network(), (4, 4, 8, 8))
    model = StepModel.cached(graph, machine(), 2, Settings())
    options = candidates(graph, 2)
    table = measure(calls_of(graph, options, 2, model.per_node), comm, CPU, 1, mode)
    for op in graph.operations:
        for candidate in options[op.layer]:
            call = local_call(op, model.parts(candidate))
            for phase in PHASES:
                if work(call, phase).kernels:
                    assert table[f"{call.key} {phase}"] > 0, (op.name, candidate, phase)
    assert comm.allgather(table) == [table] * comm.size


@pytest.mark.ranks(2)
def test_the_sum_of_weights_gradients_is_not_in_the_figure_and_what_was_kept_stays(comm):
    op = trace(Network(), (4, 4, 8, 8)).operations[0]
    call, grid = local_call(op, AxisParts.from_axes({"n": 2}, 2, 2)), dc.ProcessGrid(comm, n=2)
    leaf, share = torch.zeros(2, requires_grad=True), torch.ones(2)
    gradient_reduction.set_unsynced_grads([(leaf, share, comm)])
    copies = [_CallCopy(call, "weight", grid, CPU, EAGER) for _ in range(2)]
    run = _backward(copies)
    with count_traffic() as traffic:
        run()
    # They are kept for the sum, which is BPa.
    assert all(leaf.grad is None for copy in copies for leaf in copy.leaves)
    assert not traffic.reduced and not traffic.sent
    assert [each[0] is leaf for each in gradient_reduction.unsynced_grads()] == [True]
    gradient_reduction.set_unsynced_grads([])


@pytest.mark.ranks(2, 3)
def test_a_convolution_with_ghosts_has_the_gradients_of_torch(comm):
    """At once on 2 ranks, in pieces on 3: what is timed is the work that there is."""
    op = trace(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 3, padding=1)), (2, 2, 12, 5)).operations[1]
    call = local_call(op, AxisParts.from_axes({"h": comm.size}, comm.size, comm.size))
    copies = {phase: _BlockConvolution(call, call.pieces, phase, CPU, EAGER) for phase in ("input", "weight")}
    for phase, copy in copies.items():
        whole = assemble_input(copy.pieces, copy.needed).values.requires_grad_()
        weight, bias = copy.weight.detach().requires_grad_(), copy.bias.detach().requires_grad_()
        expected = torch.autograd.grad(F.conv2d(whole, weight, bias), (whole, weight, bias), copy.error)
        found = copy.backward()()
        if phase == "weight":
            wanted = expected[1:]
        else:
            wanted = [crop(Piece(expected[0], copy.needed), piece.box) for piece in copy.pieces]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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


class Clock:
    """Says that timed runs take ``seconds`` in turn, times as many as the rank's number, counted from 1."""

    def __init__(self, rank, seconds):
        self.lasts, self.now, self.running = itertools.cycle(seconds), 0.0, False
        self.slower = rank + 1

    def perf_counter(self):
        if self.running:
            self.now += next(self.lasts) * self.slower
        self.running = not self.running
        return self.now


@pytest.mark.ranks(1, 2)
def test_a_roofline_is_work_over_the_time_of_the_slowest_rank(comm, monkeypatch):
    monkeypatch.setattr(measure_operations, "time", Clock(comm.rank, [1.0, 2.0, 4.0]))
    monkeypatch.setattr(measure_operations, "LARGE_ELEMENTS", 1000)
    found, runs = measure_roofline(comm, CPU), measure_operations.REPETITIONS
    macs = 4 * 64 * 64 * 128 * (128 * 3 * 3)
    assert found.flops_per_s == pytest.approx(2 * macs * runs / comm.size)
    assert found.bytes_per_s == pytest.approx(3 * 4 * 1000 * runs / (2 * comm.size))
    assert found.kernel_s == pytest.approx(4 * comm.size / measure_operations.SUMS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("seconds", "difference"), [((1.0, 2.0, 7.0), 2.0), ((1.0, 2.0, 2.0), 0.0)])
def test_an_exchange_costs_what_a_convolution_takes_beyond_its_computation(comm, monkeypatch, seconds, difference):
    monkeypatch.setattr(measure_operations, "time", Clock(comm.rank, seconds))
    found = measure_exchange(comm, CPU)
    assert found == pytest.approx(difference * comm.size / measure_operations.REPETITIONS)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("copies", "runs", "times"), [(1 << 30, 10, 2), (0, 10, 5)])
def test_a_time_is_the_mean_of_its_runs_after_some_that_warm_up(comm, monkeypatch, copies, runs, times):
    """In the fastest of three rounds."""
    monkeypatch.setattr(measure_operations, "time", Clock(comm.rank, [5.0, 7.0, 3.0, 9.0, 6.0, 8.0]))
    monkeypatch.setattr(measure_operations, "CACHE_BYTES", copies)
    made = []
    graph = trace(nn.Sequential(nn.Conv2d(4, 4, 1)), (2, 4, 8, 8))
    monkeypatch.setattr(
        measure_operations, "_runs_of_phase", lambda call, phase, count, *_, **__: _Runs(lambda: made.append(0), count)
    )
    table = measure(calls_of(graph, {"0": [{"n": 2}]}, 2, 2), comm, CPU)
    assert list(table.values()) == [pytest.approx(best * comm.size / runs) for best in (3.0, 7.0)]  # FP, BPw
    assert len(made) == 2 * 3 * (1 + 1 + times)  # to see that it runs, to warm up, and as often as is measured


@pytest.mark.ranks(1, 2)
def test_captured_runs_compute_what_eager_ones_do(comm, monkeypatch):
    """Forward, and both passes: their difference is the backward pass. In-place operations change copies."""
    network = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(inplace=True), nn.AvgPool2d(2))
    graph, grid = trace(network, (2, 2, 4, 4)), dc.ProcessGrid(comm, n=comm.size)
    mode = StepMode("channels_last", captured=True)
    captured = []
    monkeypatch.setattr(
        measure_operations, "capture", lambda step, **options: captured.append(dc.capture(step, **options)) or step
    )
    for op in graph.operations:
        call = local_call(op, AxisParts.from_axes({"n": 2}, 2, 2))
        for phase, runs in _runs(call, grid, CPU, mode).items():
            assert runs.count == measure_operations.MAX_COPIES
            assert (runs.less is None) is (phase == "forward" or call.pieces is not None)
    assert captured
    for step in captured:
        expected, found = tree_leaves(step.__wrapped__()), tree_leaves(step())
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(dc.gather(one), dc.gather(other), rtol=0, atol=0)


def test_a_backward_pass_takes_what_both_passes_take_beyond_the_forward_pass(monkeypatch):
    monkeypatch.setattr(measure_operations, "time", Clock(0, [50.0, 20.0]))
    runs = _Runs(lambda: None, 5, lambda: None)
    assert _time_runs(runs, MPI.COMM_SELF, CPU) == pytest.approx(3.0)
    monkeypatch.setattr(measure_operations, "time", Clock(0, [20.0, 50.0]))
    assert _time_runs(runs, MPI.COMM_SELF, CPU) == measure_operations.LEAST_S


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("seconds", "each"), [((3.0, 1.0), 2.0), ((1.0, 3.0), 0.0)])
def test_a_gradient_costs_what_a_pass_with_sums_takes_beyond_one_without(comm, monkeypatch, seconds, each):
    monkeypatch.setattr(measure_operations, "time", Clock(comm.rank, seconds))
    leaf, share = torch.zeros(2, requires_grad=True), torch.ones(2)
    gradient_reduction.set_unsynced_grads([(leaf, share, comm)])
    found = measure_sum(comm, CPU)
    runs = measure_operations.REPETITIONS * measure_operations.SUMS
    assert found == pytest.approx(each * comm.size / runs)
    assert [kept[0] is leaf for kept in gradient_reduction.unsynced_grads()] == [True]
    gradient_reduction.set_unsynced_grads([])


@pytest.mark.ranks(2)
def test_sums_are_sent_in_one_of_the_passes_alone(comm, monkeypatch):
    reduced = []

    def timed(runs, comm, device):
        with count_traffic() as traffic:
            runs.take()
        reduced.append(sum(traffic.reduced.values()))
        return 1.0

    monkeypatch.setattr(measure_operations, "_time_runs", timed)
    measure_sum(comm, CPU)
    bytes_of_all = 4 * measure_operations.SUMS * 16 * 16
    assert len(reduced) == 2 * measure_operations.DIFFERENCES
    assert min(reduced[::2]) >= bytes_of_all and set(reduced[1::2]) == {0}
