"""Measure memory, traffic and time of a stack of equal convolutions over a grid.

The memory is that of the weights, gradients and optimizer state that a rank holds. The traffic is the number of bytes
that rank 0 passes to MPI. Times are compared with one rank that has all channels, and with the fastest of several ways
to run plain torch, interleaved in the same run.

With --layer, measures forward and backward of a single convolution of the paper, and compares them with predictions:
for --machine, or for this machine, which is profiled first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.arrangement import parse_grid
from distconv.communication.transport import Traffic, count_traffic
from distconv.errors import DistconvError
from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.bench.steps import torch_step
from distconv.jobs.bench.steps.torch_process import TorchProcess, add_compile_argument, torch_variants
from distconv.jobs.bench.steps.torch_step import FORMATS, StepOptions
from distconv.jobs.planning.options import add_machine_argument, run_on_rank_0
from distconv.jobs.planning.single_layers import LAYERS
from distconv.jobs.timing import idle, medians, time_interleaved, timed_variants
from distconv.jobs.training.options import add_device_argument, positive_int, select_device
from distconv.parallel import parallelize
from distconv.parameters.channel_split import AXIS
from distconv.parameters.sharding import convolution_split
from distconv.perfmodel.machine.machine import Machine
from distconv.placement import scatter
from distconv.tensor import DistTensor

from . import paper_layers

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv bench layer --grid c=4 --channels 1024 --layers 2 --size 14
  mpiexec -n 4 distconv bench layer --grid n=2,c=2 --channels 256 --groups 32 --batch 4
  mpiexec -n 2 distconv bench layer --grid h=2 --channels 16 --size 512 --memory-format channels_last
  mpiexec -n 2 distconv bench layer --layer conv1 --grid h=2 --batch 1 --machine localhost
"""

MIB = 2**20

STACK = {"channels": 1024, "groups": 1, "kernel": 3, "layers": 2, "size": 14, "rounds": 5}
"""Options of the stack of layers, with their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench layer``."""
    parser.add_argument("--grid", default="", metavar="c=4", help="process grid (default: all ranks along c)")
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        help="measure this single layer of the paper in float32, not a stack; goes with --grid, --batch, --device "
        "and --machine",
    )
    add_device_argument(parser, "device of --layer")
    add_machine_argument(parser, required=False)
    parser.add_argument("--batch", type=positive_int, default=1, help="samples per step (default: %(default)s)")
    for name, text in (
        ("channels", "input and output channels of each convolution"),
        ("groups", "groups of each convolution"),
        ("kernel", "odd kernel size"),
        ("layers", "number of convolutions, each with ReLU"),
        ("size", "height and width of the sample"),
        ("rounds", "interleaved repetitions of each variant"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, help=f"{text}; without --layer (default: {STACK[name]})")
    parser.add_argument(
        "--memory-format",
        choices=FORMATS,
        default="contiguous",
        help="memory format of the input and the weights (default: %(default)s)",
    )
    add_compile_argument(parser)
    report.add_json_argument(parser)


class LayerStack:
    """The layers with an optimizer and a sample, over ``grid``."""

    def __init__(self, options: StepOptions, grid: ProcessGrid) -> None:
        model, x, labels = torch_step.build(options)
        self.model = parallelize(model, grid)
        self._training = torch_step.training(model, scatter(x, grid), scatter(labels, grid, dims="nhw"), options)
        self.x, self.optimizer = self._training.x, self._training.optimizer

    def step(self) -> None:
        """Take a step: forward, backward, update."""
        self._training.step()

    def held_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state on this rank."""
        held = 0
        for parameter in self.model.parameters():
            for kept in (parameter, parameter.grad, *self.optimizer.state[parameter].values()):
                if isinstance(kept, DistTensor):
                    held += kept.local.nbytes
                elif isinstance(kept, torch.Tensor):
                    held += kept.nbytes
        return held


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    axes = parse_grid(options.grid) if options.grid else {AXIS: comm.size}
    _check(options)
    if options.layer is not None:
        machine = run_on_rank_0(comm, lambda: Machine.load(options.machine)) if options.machine else None
        device = torch.device(select_device(options.device, comm))
        figures = paper_layers.run(
            options.layer, options.batch, axes, device, machine, memory_format=options.memory_format
        )
        if figures is not None:
            report.print_json(figures, options.json)
        return 0
    options = argparse.Namespace(**vars(options) | _stack(options))
    grid, step = ProcessGrid(comm, **axes), _step_options(options)
    split = LayerStack(step, grid)
    with count_traffic() as traffic:
        split.step()
    held = comm.gather(split.held_bytes())
    single = LayerStack(step, ProcessGrid(MPI.COMM_SELF)) if comm.rank == 0 else None
    ways = torch_variants(torch.get_num_threads(), comm.size, compiled=options.compile)
    children = {name: TorchProcess(variant, step) for name, variant in ways.items() if comm.rank == 0}
    variants = timed_variants({"ranks": split.step, **({"one": single.step} if single is not None else {})})
    variants |= {name: partial(child.steps, 1) for name, child in children.items()}
    # All ranks have all variants, in the same order: time_interleaved waits for every rank in each of them.
    waiting = dict.fromkeys(("ranks", "one", *ways), idle)
    times = time_interleaved(comm, waiting | variants, options.rounds, asleep=True)
    for child in children.values():
        child.close()
    if single is not None and held is not None:
        _report(options, grid, split, alone=single.held_bytes(), held=held, traffic=traffic, times=times)
    return 0


def _step_options(options: argparse.Namespace) -> StepOptions:
    """Return the step of the stack: forward, mean, backward, SGD with momentum."""
    sizes = (options.size, options.channels, options.layers, options.batch)
    return StepOptions(
        "convolution",
        *sizes,
        memory_format=options.memory_format,
        kernel=options.kernel,
        groups=options.groups,
        loss="mean",
        momentum=0.9,
    )


def _check(options: argparse.Namespace) -> None:
    """Raise DistconvError for options that would be ignored, and for impossible layers."""
    strange = [name for name in (STACK if options.layer else ("device", "machine")) if getattr(options, name)]
    if options.layer and not options.compile:
        strange.append("no-compile")
    if strange and options.layer:
        raise DistconvError(
            f"--{strange[0]}: not an option of a single layer (--layer {options.layer}). Remove one of the two options."
        )
    if strange:
        raise DistconvError(f"--{strange[0]}: only an option of a single layer. Select a layer with --layer.")
    stack = _stack(options)
    if stack["channels"] % stack["groups"]:
        raise DistconvError(
            f"--groups {stack['groups']}: does not divide --channels {stack['channels']}. Use a divisor."
        )
    if stack["kernel"] % 2 == 0:
        raise DistconvError(
            f"--kernel {stack['kernel']}: the kernel size must be odd, or outputs are larger than inputs. Use "
            f"{stack['kernel'] + 1}."
        )


def _stack(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) or default for name, default in STACK.items()}


def _report(
    options: argparse.Namespace,
    grid: ProcessGrid,
    split: LayerStack,
    *,
    alone: int,
    held: list[int],
    traffic: Traffic,
    times: dict[str, list[float]],
) -> None:
    threads = torch.get_num_threads()
    print(
        report.heading(
            f"{options.layers} x (conv {options.kernel}x{options.kernel}, {options.channels} channels and filters, "
            f"groups {options.groups}, ReLU) over {grid.describe()}, float32, {options.memory_format}, "
            f"N={options.batch}, {options.size} x {options.size}, SGD with momentum"
        )
    )
    print(f"algorithm: {_algorithm(split, grid)}")
    ratio = max(held) / alone
    print(f"weights, gradients and optimizer state: one rank {alone / MIB:.2f} MiB, ", end="")
    print(f"worst of {len(held)} ranks {max(held) / MIB:.2f} MiB, ratio {ratio:.4f}")
    print("bytes that rank 0 passes to MPI in one step:")
    for line in _traffic(traffic):
        print(f"  {line}")
    names = {"ranks": f"{grid.size} ranks x {threads} thread(s)", "one": f"one rank x {threads} thread(s)"}
    times = {names.get(name, name): values for name, values in times.items()}
    fastest = min([*times][2:], key=lambda name: statistics.median(times[name]))
    print(report.time_table(times, fastest, ratio="to the fastest torch"))
    figures: dict[str, Any] = {
        "held_bytes": held,
        "alone_bytes": alone,
        "ratio": ratio,
        "sent_bytes": dict(traffic.sent),
        "reduced_bytes": {f"{what} over {ranks} ranks": size for (what, ranks), size in traffic.reduced.items()},
        "median_s": medians(times),
    }
    report.print_json(figures, options.json)


def _algorithm(split: LayerStack, grid: ProcessGrid) -> str:
    parts = grid.shape[AXIS]
    if parts == 1:
        return "full weights on every rank"
    chosen = convolution_split(next(m for m in split.model.modules() if isinstance(m, torch.nn.Conv2d)), parts)
    blocks = chosen.blocks
    name = "gather-x" if blocks == 1 else "reduce-y" if blocks == parts else "2-D"
    return f"{name}: filters in {parts // blocks} blocks, channels in {blocks}"


def _traffic(traffic: Traffic) -> Iterator[str]:
    for what, size in sorted(traffic.sent.items()):
        yield f"messages, {what}: {size / MIB:.3f} MiB"
    for (what, ranks), size in sorted(traffic.reduced.items()):
        yield f"allreduce over {ranks} ranks, {what}: {size / MIB:.3f} MiB"
    gradients = sum(size for (what, _), size in traffic.reduced.items() if what.startswith("gradient"))
    yield f"allreduce of gradients of weights in all: {gradients / MIB:.3f} MiB"
