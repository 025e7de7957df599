"""Compare a training step on a GPU with plain torch, and measure the overlap of a halo exchange.

Rank 0 trains the model by itself, with all variants interleaved: plain in both memory formats, eager and compiled, of
which the fastest is the reference; then parallelized, and parallelized with capture. Then all ranks run one convolution
of the given input, split over its height: with its halo exchange, without it (the same local work on halos received
before), and the exchange by itself, by MPI, or by NCCL if that is selected. The hidden time is the sum of the last two
minus the first, as a fraction of the exchange.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import device_transport
from distconv.communication.gpu.device_transport import DeviceTransport
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution, default_axes
from distconv.jobs.bench import report
from distconv.jobs.bench.steps.torch_process import add_compile_argument
from distconv.jobs.planning.measured_steps import random_tensor, training_step
from distconv.jobs.planning.options import add_network_arguments, run_on_first_ranks
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.model_factory import build_model
from distconv.jobs.training.options import add_device_argument, positive_int, select_device
from distconv.kernels.convolution import Geometry
from distconv.layers.common.input_windows import window_needs
from distconv.memory_format import FORMATS, convert_weights, named_format

EXAMPLES = """\
examples:
  distconv bench gpu --model resnet50 --input 3,224,224 --batch 32
  mpiexec -n 2 distconv bench gpu --model mesh2k --input 18,2048,2048 --batch 1 --width 64 --channels 64
"""

Actions = dict[str, Callable[[], object]]
Times = dict[str, list[float]]
WARM_UP = 3
PLAIN = "torch"
LOCAL, CONVOLUTION, EXCHANGE = "local work alone", "convolution by", "exchange alone by"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench gpu``."""
    add_network_arguments(parser)
    add_device_argument(parser)
    parser.add_argument(
        "--channels",
        type=positive_int,
        default=64,
        help="channels of the convolution whose overlap is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--memory-format",
        choices=FORMATS,
        default="contiguous",
        help="memory format of the input and the weights of distconv; torch is measured in both (default: %(default)s)",
    )
    parser.add_argument("--bfloat16", action="store_true", help="compute model and loss under torch.autocast")
    add_compile_argument(parser)
    parser.add_argument(
        "--rounds", type=positive_int, default=11, help="interleaved repetitions of each variant (default: %(default)s)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    device = torch.device(select_device(options.device, comm))

    def times(comm: MPI.Intracomm, actions: Actions) -> Times:
        return time_interleaved(comm, timed_variants(actions, device), options.rounds, warm_up=WARM_UP)

    alone = run_on_first_ranks(comm, 1, lambda: times(MPI.COMM_SELF, _steps(options, device)))
    split = times(comm, _convolution(options, comm, device)) if comm.size > 1 else {}
    if comm.rank == 0:
        _print(options, comm.size, alone or {}, split)
    return 0


def _steps(options: argparse.Namespace, device: torch.device) -> Actions:
    """Return training steps of the model on one rank: forward, mean square, backward, SGD with momentum."""
    model = build_model(
        options.model, MPI.COMM_SELF, seed=0, in_channels=options.input[0], classes=options.classes, width=options.width
    ).to(device)
    x = torch.randn(options.batch, *options.input, device=device)
    take = partial(training_step, bfloat16=options.bfloat16)

    def in_format(name: str) -> tuple[nn.Module, torch.Tensor]:
        copied = copy.deepcopy(model)
        convert_weights(copied, name)
        return copied, x.contiguous(memory_format=named_format(name, x.dim()))

    actions: Actions = {}
    for name in FORMATS:
        actions[f"{PLAIN}, {name}"] = take(*in_format(name))
        if options.compile:
            actions[f"{PLAIN}, {name}, compiled"] = take(*in_format(name), compiled=True)
    grid = dc.ProcessGrid(MPI.COMM_SELF)
    for captured in (False, True):
        own, batch = in_format(options.memory_format)
        what = f"distconv, one rank, {options.memory_format}{', captured' * captured}"
        actions[what] = take(dc.parallelize(own, grid), dc.scatter(batch, grid), captured=captured)
    return actions


def _convolution(options: argparse.Namespace, comm: MPI.Intracomm, device: torch.device) -> Actions:
    """Return the forward pass of a 3x3 convolution over ``comm``, its local work alone, and its exchange alone."""
    grid = dc.ProcessGrid(comm, h=comm.size)
    dist, shape = Distribution(grid, default_axes(None, 4)), (options.batch, options.channels, *options.input[1:])
    x = random_tensor(dist, shape, device)
    layer = nn.Conv2d(options.channels, options.channels, 3, padding=1, bias=False, device=device)
    plan = transfer_plan(
        dist, window_needs(dist, x.shape, x.shape, Geometry(*((n, n) for n in (3, 1, 1, 1)))), shape, ghosts=True
    )
    ghosts = [torch.randn(s, device=device) for s in plan.destination_shapes]

    # As much work as in the convolution: the owned block, and one row of output for each halo.
    @torch.no_grad()
    def work() -> None:
        y = F.conv2d(x.local, layer.weight, padding=1)
        for rows in ghosts:
            y[:, :, :1] += F.conv2d(rows, layer.weight[:, :, :1], padding=(0, 1))

    chosen = device_transport.choose_transport(grid.world, x.local)
    by_mpi = "MPI, device memory" if chosen.mpi_support.messages else "MPI, host memory"
    ways = {by_mpi: chosen._replace(channel=None)} | ({"NCCL": chosen} if chosen.channel else {})
    actions: Actions = {LOCAL: work}
    for name, way in ways.items():
        actions[f"{CONVOLUTION} {name}"] = _by(way, grid, torch.no_grad()(lambda: layer(x)))
        actions[f"{EXCHANGE} {name}"] = _by(way, grid, lambda: plan.start(x.local).finish())
    return actions


def _by(way: DeviceTransport, grid: dc.ProcessGrid, action: Callable[[], object]) -> Callable[[], object]:
    """Return ``action``, preceded by the selection of its transport for all transfers over the grid."""

    def act() -> None:
        CommunicatorRegistry.get(grid.world).get_attached(device_transport.Transports)["cuda"] = way
        action()

    return act


def _print(options: argparse.Namespace, ranks: int, alone: Times, split: Times) -> None:
    precision = "bfloat16 by torch.autocast" if options.bfloat16 else "float32"
    print(report.heading(f"{options.model}, {options.batch} x {options.input}, {precision}"))
    median = medians(alone | split)
    print(report.table_head())
    references = [name for name in alone if name.startswith(PLAIN)], [LOCAL]
    for times, names in zip((alone, split), references, strict=True):
        reference = min(median[name] for name in names) if times else None
        for name, values in times.items():
            print(report.time_row(name, values, reference))
    for name in split:
        if name.startswith(EXCHANGE):
            way, exchange = name.removeprefix(EXCHANGE).strip(), median[name]
            hidden = min(1.0, (median[LOCAL] + exchange - median[f"{CONVOLUTION} {way}"]) / exchange)
            print(f"{ranks} ranks, {way}: {hidden:.0%} of the exchange is hidden")
    report.print_json({"median_s": median}, options.json)
