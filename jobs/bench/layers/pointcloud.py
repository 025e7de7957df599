"""``distconv bench pointcloud``: a sparse network on point clouds against its dense twin on all voxels.

A step is forward, cross entropy, backward and SGD on one mini-batch of embedded shapes: 4,096 of 16,384 points are
drawn, and a share p of these is kept (point dropout). Kernel maps are built in each step, as clouds change. D is the
dense twin, S-p the sparse network. Each first takes a step in a process of its own that may not hold more than --cap:
what dies of that is not timed. The rest take turns in one run.

Source: Zhai et al., "SparsePipe", Table II (speed-ups against point dropout), Fig. 8 (memory against resolution).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.errors import DistconvError, GridError
from distconv.jobs.bench import report
from distconv.jobs.bench.child_processes import MIB, Peak, first_step, in_new_process
from distconv.jobs.commands.train_pointcloud import share
from distconv.jobs.pointcloud.batches import Recipe, VoxelBatch, voxel_batch
from distconv.jobs.pointcloud.sampling import CACHED_POINTS
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.jobs.timing import clocked, in_turns, medians
from distconv.jobs.training.options import positive
from distconv.layers.models.sparse import dense_resnet, dense_vgg16_bn, sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseTensor, to_dense

EXAMPLES = """\
examples:
  distconv bench pointcloud
  distconv bench pointcloud --resolution 32 50 100 200 --keep 1 --batch 2 --width 32 --rounds 1
"""

NETWORKS: dict[str, tuple[Callable[..., torch.nn.Module], Callable[..., torch.nn.Module]]] = {
    "vgg16_bn": (sparse_vgg16_bn, dense_vgg16_bn),
    "resnet": (sparse_resnet, dense_resnet),
}
"""Sparse networks and their dense twins."""

DENSE, OUT_OF_MEMORY = "D-1", "out of memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv bench pointcloud``."""
    parser.add_argument("--model", choices=NETWORKS, default="vgg16_bn", help="default: %(default)s")
    parser.add_argument("--width", type=positive, default=8, help="channels of the first layer (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="clouds (default: %(default)s)")
    parser.add_argument(
        "--resolution", type=positive, nargs="+", default=[32, 50], help="voxels along a side (default: 32 50)"
    )
    parser.add_argument("--keep", type=share, nargs="+", default=[1.0, 0.5, 0.25], help="p (default: 1 0.5 0.25)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--cap", type=positive, default=16, metavar="GIB", help="memory of one (default: %(default)s)")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print.

    Raises
    ------
    GridError
        If there are several ranks.
    """
    if MPI.COMM_WORLD.size > 1:
        raise GridError(
            f"bench pointcloud measures one process, not {MPI.COMM_WORLD.size} ranks; start it without mpiexec"
        )
    if options.alone:
        print(json.dumps(asdict(_measured_here(options))))
        return 0
    print(
        report.heading(
            f"{options.model} of width {options.width}, {options.batch} clouds, float32, a training step, "
            f"{torch.get_num_threads()} thread(s)"
        )
    )
    figures = {str(resolution): _compared(options, resolution) for resolution in options.resolution}
    report.give_json({"resolution": figures}, options.json)
    return 0


def batch_of(options: argparse.Namespace, resolution: int, keep: float) -> VoxelBatch:
    """The voxels of the first embedded shapes."""
    return voxel_batch(Shapes(options.batch, CACHED_POINTS), range(options.batch), Recipe(resolution, keep=keep), 0)


def step_of(options: argparse.Namespace, resolution: int, name: str) -> Callable[[], torch.Tensor]:
    """What takes a training step of a variant, with the same first weights, and returns its loss."""
    sparse, dense = NETWORKS[options.model]
    torch.manual_seed(0)
    model = (dense if name == DENSE else sparse)(width=options.width)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    voxels = batch_of(options, resolution, 1.0 if name == DENSE else float(name.removeprefix("S-")))

    def x() -> Any:
        cloud = SparseTensor(voxels.coords, voxels.features, batch_size=options.batch)
        return to_dense(cloud, (resolution,) * 3) if name == DENSE else cloud

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x()), voxels.labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _measured_here(options: argparse.Namespace) -> Peak:
    """A first step under the cap.

    Raises
    ------
    DistconvError
        If that is not enough.
    """
    cap = options.cap << 30
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    try:
        return first_step(lambda: step_of(options, options.resolution[0], options.alone))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        raise DistconvError(f"{OUT_OF_MEMORY}: {str(error).splitlines()[0]}") from None


def _alone(options: argparse.Namespace, resolution: int, name: str) -> Peak | None:
    """Memory of a variant in a process of its own; None if it dies of the cap."""
    given = {"model": options.model, "width": options.width, "batch": options.batch, "cap": options.cap}
    words = ["pointcloud", "--alone", name, "--resolution", str(resolution)]
    try:
        return in_new_process(words + [word for key, value in given.items() for word in (f"--{key}", str(value))])
    except DistconvError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return None


def _compared(options: argparse.Namespace, resolution: int) -> dict[str, Any]:
    """Times and memory of all variants at one resolution, which are printed too."""
    names = [DENSE, *(f"S-{keep:g}" for keep in options.keep)]
    peaks = {name: _alone(options, resolution, name) for name in names}
    fitting = [name for name in names if peaks[name] is not None]
    steps = {name: step_of(options, resolution, name) for name in fitting}
    times = in_turns(MPI.COMM_SELF, clocked(steps), options.rounds)
    reference = statistics.median(times[DENSE]) if DENSE in times else None
    voxels = {keep: len(batch_of(options, resolution, keep).coords) for keep in options.keep}
    shares = ", ".join(f"p={k:g} {n} ({n / options.batch / resolution**3:.2%})" for k, n in voxels.items())
    print(f"\n{resolution}^3, voxels: {shares}\n{report.table_head(ratio='to D-1')}")
    for name in names:
        peak = peaks[name]
        if peak is None:
            print(f"{name:<44} more than --cap {options.cap} GiB: not run")
        else:
            print(f"{report.row(name, times[name], reference)}  {peak.used / MIB:8.0f} MiB")
    return {
        "voxels": {f"{keep:g}": number for keep, number in voxels.items()},
        "median_s": medians(times),
        "memory_bytes": {name: None if peak is None else peak.used for name, peak in peaks.items()},
    }
