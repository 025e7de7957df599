"""``distconv bench layer --layer``: FP and BP of a single convolution, with what the performance model says of it.

BP is without the allreduce of dL/dw, which a training step hides behind other layers. Warm-up runs, then mean and
standard deviation of ten. Source: Dryden et al. 2019, VI-A, Figures 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.gradient_reduction import no_sync
from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.bench import comparison, report
from distconv.jobs.bench.comparison import Comparison, random, timed
from distconv.jobs.commands.profile import machine_of
from distconv.jobs.planning.options import on_first_ranks, wait_asleep
from distconv.parallel import parallelize
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import Parts
from distconv.perfmodel.cost.operation_cost import Costs
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.graph import Operation
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.measure_links import profile_network
from distconv.perfmodel.profiles.measure_operations import measure

WARM_UP = 3
REPETITIONS = 10


@dataclass(frozen=True)
class PaperLayer:
    """A convolution without bias of ``extent`` x ``extent`` inputs, padded by half its kernel."""

    channels: int
    extent: int
    filters: int
    kernel: int
    stride: int = 1

    def build(self) -> torch.nn.Conv2d:
        """The layer, its weights from a seed."""
        torch.manual_seed(0)
        return torch.nn.Conv2d(
            self.channels, self.filters, self.kernel, self.stride, padding=self.kernel // 2, bias=False
        )

    def input_shape(self, batch: int) -> tuple[int, int, int, int]:
        """N, C, H, W."""
        return batch, self.channels, self.extent, self.extent


LAYERS = {
    "conv1": PaperLayer(3, 224, 64, 7, stride=2),
    "res3b_branch2a": PaperLayer(512, 28, 128, 1),
    # Of our mesh2k (distconv.layers.models.mesh): its first convolution, and the first of its sixth block.
    "mesh_conv1_1": PaperLayer(18, 2048, 128, 3, stride=2),
    "mesh_conv6_1": PaperLayer(128, 64, 128, 3, stride=2),
}
"""The layers of Figures 2 and 3 by name."""

PHASES = ("FP", "BP")


class Bench:
    """A layer over a grid, with random input and error signal."""

    def __init__(self, layer: PaperLayer, batch: int, grid: ProcessGrid, device: torch.device) -> None:
        self.comm, self.device = grid.world, device
        self.layer = parallelize(layer.build().to(device), grid)
        dist = Distribution(grid, default_axes("nchw", 4))
        self.x = random(dist, layer.input_shape(batch), device).requires_grad_()
        with torch.no_grad():
            y = self.layer(self.x)
        self.error = random(y.dist, tuple(y.shape), device)

    def times(self) -> dict[str, float]:
        """Seconds of FP and of BP, on the slowest rank. Collective over the grid."""
        self.layer.zero_grad()
        self.x.grad = None
        found: list[torch.Tensor] = []
        forward = timed(self.comm, self.device, lambda: found.append(self.layer(self.x)))
        with no_sync():
            backward = timed(self.comm, self.device, lambda: found[0].backward(self.error))
        return dict(zip(PHASES, (forward, backward), strict=True))


def operation(layer: PaperLayer, batch: int) -> Operation:
    """The layer as it is within a network, where its input has a gradient."""
    (op,) = trace(torch.nn.Sequential(layer.build()), layer.input_shape(batch)).operations
    return replace(op, inputs=(replace(op.x, requires_grad=True),))


def this_machine(layer: PaperLayer, batch: int, axes: Mapping[str, int], device: torch.device) -> Machine:
    """This machine, profiled for the layer on one rank and over the grid (V-A). Collective over MPI.COMM_WORLD."""
    comm, op = MPI.COMM_WORLD, operation(layer, batch)
    machine = machine_of("this machine", profile_network(comm, device), comm, device)

    def table(parts: Mapping[str, int], ranks: int, group: MPI.Intracomm) -> dict[str, float]:
        call = local_call(op, Parts.of(parts, ranks, machine.ranks_per_node))
        return on_first_ranks(comm, ranks, lambda: measure({call.key: call}, group, device))

    alone, *together = machine.compute
    entries = [replace(alone, table=table({}, 1, MPI.COMM_SELF))]
    entries += [replace(entry, table=table(axes, comm.size, comm)) for entry in together]
    return replace(machine, compute=tuple(entries))


def predicted(layer: PaperLayer, batch: int, axes: Mapping[str, int], ranks: int, machine: Machine) -> dict[str, float]:
    """Seconds of FP and of BP, exchanges included as far as computation does not hide them, without the allreduce."""
    op = operation(layer, batch)
    cost = Costs(machine, ranks, Settings()).operation(op, Parts.of(axes, ranks, machine.ranks_per_node))
    return dict(zip(PHASES, (cost.forward, cost.backward), strict=True))


def run(
    name: str, batch: int, axes: Mapping[str, int], device: torch.device, machine: Machine | None
) -> dict[str, Any] | None:
    """Measure over all ranks and on one, taking turns, and print; predicted for ``machine``, or for this one.

    Returns the figures on rank 0. Collective over MPI.COMM_WORLD.
    """
    comm, layer = MPI.COMM_WORLD, LAYERS[name]
    grid = ProcessGrid(comm, **axes)
    machine = machine or this_machine(layer, batch, axes, device)
    benches = {"ranks": Bench(layer, batch, grid, device)}
    if comm.rank == 0:
        benches["one"] = Bench(layer, batch, ProcessGrid(MPI.COMM_SELF), device)
    times: dict[str, list[dict[str, float]]] = {which: [] for which in benches}
    for turn in range(WARM_UP + REPETITIONS):
        for which, bench in benches.items():
            found = bench.times()
            if turn >= WARM_UP:
                times[which].append(found)
        wait_asleep(comm)
    if comm.rank:
        return None
    rows = _compared(layer, batch, axes, machine=machine, times=times, grid=grid)
    _report(name, batch, grid, rows, device=device, machine=machine)
    return {found.name: found.figures() for found in rows}


def _compared(
    layer: PaperLayer,
    batch: int,
    axes: Mapping[str, int],
    *,
    machine: Machine,
    times: Mapping[str, list[dict[str, float]]],
    grid: ProcessGrid,
) -> list[Comparison]:
    rows = []
    for which, where, parts, ranks in (("one", "1 rank", {}, 1), ("ranks", grid.describe(), axes, grid.size)):
        expected = predicted(layer, batch, parts, ranks, machine)
        for phase in PHASES:
            rows.append(Comparison(f"{phase}, {where}", [turn[phase] for turn in times[which]], expected[phase]))
    return rows


def _report(
    name: str, batch: int, grid: ProcessGrid, rows: list[Comparison], *, device: torch.device, machine: Machine
) -> None:
    layer = LAYERS[name]
    print(
        report.heading(
            f"{name}: C={layer.channels}, {layer.extent} x {layer.extent}, F={layer.filters}, K={layer.kernel}, "
            f"S={layer.stride}, float32, N={batch}, {device.type}, over {grid.describe()}, {torch.get_num_threads()} "
            f"thread(s) per rank, predicted for {machine.name}; BP without the allreduce"
        )
    )
    print(comparison.table_head(f"ms, {REPETITIONS} runs"))
    for found in rows:
        print(comparison.row(found))
