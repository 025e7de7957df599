"""``distconv bench layer --layer``: FP and BP of a single convolution, with the prediction of the performance model.

BP excludes the all-reduce of dL/dw, which overlaps with other layers in a training step. Warm-up runs, then mean and
standard deviation of ten. Source: Dryden et al. 2019, VI-A, Figures 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.gradient_reduction import no_sync
from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.bench.report import TimeComparison
from distconv.jobs.bench.steps.torch_step import FORMATS
from distconv.jobs.commands.profile import measure_machine, measure_mode
from distconv.jobs.planning.measured_steps import random_tensor
from distconv.jobs.planning.options import run_on_first_ranks
from distconv.jobs.planning.single_layers import LAYERS, PHASES, PaperLayer, as_operation, predict_times
from distconv.jobs.timing import Variant, idle, time_interleaved, timed_variants
from distconv.parallel import parallelize
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.measure_links import profile_network
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.profiles.measure_operations import measure

WARM_UP = 3
REPETITIONS = 10


class Bench:
    """A layer over a grid, with random input and activation gradient."""

    def __init__(
        self, layer: PaperLayer, batch: int, grid: ProcessGrid, device: torch.device, memory_format: str
    ) -> None:
        self.device, order = device, FORMATS[memory_format]
        self.layer = parallelize(layer.build().to(device, memory_format=order), grid)  # type: ignore[call-overload]
        dist = Distribution(grid, default_axes("nchw", 4))
        x = random_tensor(dist, layer.input_shape(batch), device).contiguous(memory_format=order)
        self.x = x.detach().requires_grad_()
        with torch.no_grad():
            y = self.layer(self.x)
        self.error = random_tensor(y.dist, tuple(y.shape), device).contiguous(memory_format=order)

    def variants(self) -> dict[str, Variant]:
        """Return variants for FP, and for FP followed by BP. Collective over the grid."""
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs[:] = [self.layer(self.x)]

        def backward() -> None:
            # Of the graph that ``forward`` made: variants run in order, so each BP follows an FP.
            with no_sync():
                outputs[0].backward(self.error)
            self.layer.zero_grad()
            self.x.grad = None

        return timed_variants({"FP": forward, "BP": backward}, self.device)


def profile_this_machine(
    layer: PaperLayer, batch: int, axes: Mapping[str, int], device: torch.device, mode: StepMode
) -> Machine:
    """Profile this machine for the layer, on one rank and over the grid (V-A). Collective over MPI.COMM_WORLD.

    Parameters
    ----------
    layer : PaperLayer
    batch : int
        Samples of a mini-batch.
    axes : mapping of str to int
        Size of each grid axis.
    device : torch.device
    mode : StepMode
        Mode of the measured runs.

    Returns
    -------
    Machine
        With the compute of the mode.
    """
    comm, op = MPI.COMM_WORLD, as_operation(layer, batch)
    machine = measure_machine("this machine", profile_network(comm, device), comm, device)
    machine = measure_mode(machine, mode, comm, device).in_mode(mode)

    def table(parts: Mapping[str, int], ranks: int, group: MPI.Intracomm) -> dict[str, float]:
        call = local_call(op, AxisParts.from_axes(parts, ranks, machine.ranks_per_node))
        return run_on_first_ranks(comm, ranks, lambda: measure({call.key: call}, group, device, mode=mode))

    alone, *together = machine.compute
    entries = [replace(alone, table=table({}, 1, MPI.COMM_SELF))]
    entries += [replace(entry, table=table(axes, comm.size, comm)) for entry in together]
    return replace(machine, compute=tuple(entries))


def run(
    name: str,
    batch: int,
    axes: Mapping[str, int],
    device: torch.device,
    machine: Machine | None,
    *,
    memory_format: str = "contiguous",
) -> dict[str, Any] | None:
    """Measure a layer over all ranks and on one rank, interleaved, and print it with its prediction.

    Collective: call on every rank of MPI.COMM_WORLD.

    Parameters
    ----------
    name : str
        Name of the layer.
    batch : int
        Samples of a mini-batch.
    axes : mapping of str to int
        Size of each grid axis.
    device : torch.device
    machine : Machine or None
        Machine of the prediction. None: this machine, which is profiled first.
    memory_format : str
        Memory format of input, weight and activation gradient.

    Returns
    -------
    dict or None
        Results on rank 0, None elsewhere.
    """
    comm, layer = MPI.COMM_WORLD, LAYERS[name]
    grid = ProcessGrid(comm, **axes)
    mode = StepMode(memory_format)
    machine = machine.in_mode(mode) if machine else profile_this_machine(layer, batch, axes, device, mode)
    variants = {
        f"{phase}, {grid.describe()}": run
        for phase, run in Bench(layer, batch, grid, device, memory_format).variants().items()
    }
    variants |= {f"{phase}, 1 rank": idle for phase in PHASES}
    if comm.rank == 0:
        one = Bench(layer, batch, ProcessGrid(MPI.COMM_SELF), device, memory_format)
        variants |= {f"{phase}, 1 rank": run for phase, run in one.variants().items()}
    times = time_interleaved(comm, variants, REPETITIONS, warm_up=WARM_UP, asleep=True)
    if comm.rank:
        return None
    rows = [
        TimeComparison(f"{phase}, {where}", times[f"{phase}, {where}"], expected)
        for where, parts, ranks in (("1 rank", {}, 1), (grid.describe(), axes, grid.size))
        for phase, expected in predict_times(layer, batch, parts, ranks, machine).items()
    ]
    _report(name, batch, grid, rows, device=device, machine=machine, memory_format=memory_format)
    return {row.name: row.as_json() for row in rows}


def _report(
    name: str,
    batch: int,
    grid: ProcessGrid,
    rows: list[TimeComparison],
    *,
    device: torch.device,
    machine: Machine,
    memory_format: str,
) -> None:
    layer = LAYERS[name]
    print(
        report.heading(
            f"{name}: C={layer.channels}, {layer.extent} x {layer.extent}, F={layer.filters}, K={layer.kernel}, "
            f"S={layer.stride}, float32, {memory_format}, N={batch}, {device.type}, over {grid.describe()}, "
            f"{torch.get_num_threads()} thread(s) per rank, predicted for {machine.name}; BP without the allreduce"
        )
    )
    print(report.comparison_head(f"ms, {REPETITIONS} runs"))
    for row in rows:
        print(report.comparison_row(row))
