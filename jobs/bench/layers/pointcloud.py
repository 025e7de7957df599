"""Compare a sparse network on point clouds with its dense equivalent on all voxels.

A step is forward, cross entropy, backward and SGD on one mini-batch of embedded shapes: 4,096 of 16,384 points are
drawn, and a fraction p of these is kept (point dropout). Kernel maps are built in each step, since clouds change. D is
the dense network, S-p the sparse one. Each variant first takes a step in a process of its own with a memory limit of
--cap, and is not timed if it exceeds this limit. The others are interleaved in one run, on one rank while the others
sleep, and on all ranks, which share the clouds.

Source: Zhai et al., "SparsePipe", Table II (speed-ups against point dropout), Fig. 8 (memory against resolution).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv import placement
from distconv.errors import DistconvError, GridError
from distconv.grid import ProcessGrid
from distconv.jobs.bench import report
from distconv.jobs.bench.child_processes import MIB, Peak, measure_first_step, run_in_new_process
from distconv.jobs.commands.train_pointcloud import positive_fraction
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.pointcloud.batches import VoxelBatch, VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.sampling import CACHED_POINTS
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.jobs.timing import Variant, idle, medians, time_interleaved, timed_variants
from distconv.jobs.training.options import positive_int
from distconv.layers.models.sparse import dense_resnet, dense_vgg16_bn, sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseTensor, scatter, to_dense
from distconv.parallel import parallelize

EXAMPLES = """\
examples:
  distconv bench pointcloud
  distconv bench pointcloud --resolution 32 50 100 200 --keep 1 --batch 2 --width 32 --rounds 1
  mpiexec -n 2 distconv bench pointcloud --width 32 --batch 4 --resolution 32
"""

NETWORKS: dict[str, tuple[Callable[..., torch.nn.Module], Callable[..., torch.nn.Module]]] = {
    "vgg16_bn": (sparse_vgg16_bn, dense_vgg16_bn),
    "resnet": (sparse_resnet, dense_resnet),
}
"""Sparse networks and their dense equivalents."""

DENSE, OUT_OF_MEMORY = "D-1", "out of memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench pointcloud``."""
    parser.add_argument("--model", choices=NETWORKS, default="vgg16_bn", help="network (default: %(default)s)")
    parser.add_argument(
        "--width", type=positive_int, default=8, help="channels of the first layer (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive_int, default=8, help="point clouds per step (default: %(default)s)")
    parser.add_argument(
        "--resolution",
        type=positive_int,
        nargs="+",
        default=[32, 50],
        help="voxels along each side of a cloud, one or more values (default: 32 50)",
    )
    parser.add_argument(
        "--keep",
        type=positive_fraction,
        nargs="+",
        default=[1.0, 0.5, 0.25],
        help="fraction p of the points that is kept, one or more values (default: 1 0.5 0.25)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="interleaved repetitions of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--cap",
        type=positive_int,
        default=16,
        metavar="GIB",
        help="memory limit of one variant, in GiB; a variant that exceeds it is not timed (default: %(default)s)",
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    GridError
        If there are more ranks than clouds.
    """
    comm = MPI.COMM_WORLD
    if comm.size > options.batch:
        raise GridError(
            f"--batch {options.batch}: fewer clouds than ranks ({comm.size}). Use a larger --batch or fewer ranks."
        )
    if options.alone:
        print(json.dumps(asdict(_measured_here(options))))
        return 0
    if comm.rank == 0:
        print(
            report.heading(
                f"{options.model} of width {options.width}, {options.batch} clouds, float32, a training step, "
                f"{comm.size} rank(s), {torch.get_num_threads()} thread(s)"
            )
        )
    with ProcessGrid(comm, n=comm.size) as grid:
        figures = {str(resolution): _compare(options, resolution, grid) for resolution in options.resolution}
    if comm.rank == 0:
        report.print_json({"resolution": figures}, options.json)
    return 0


def make_batch(options: argparse.Namespace, resolution: int, keep: float) -> VoxelBatch:
    """Return the voxels of the first embedded shapes.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    resolution : int
        Voxels along each side.
    keep : float
        Fraction of the points that is kept.

    Returns
    -------
    VoxelBatch
    """
    return voxel_batch(
        Shapes(options.batch, CACHED_POINTS), range(options.batch), VoxelRecipe(resolution, keep=keep), 0
    )


def make_step(
    options: argparse.Namespace, resolution: int, name: str, grid: ProcessGrid | None = None
) -> Callable[[], torch.Tensor]:
    """Return a function that takes a training step of a variant, from the same weights, and returns its loss.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    resolution : int
        Voxels along each side.
    name : str
        Variant.
    grid : ProcessGrid, optional
        Grid that splits the samples. Then the call, and each step, is collective.

    Returns
    -------
    callable
    """
    sparse, dense = NETWORKS[options.model]
    torch.manual_seed(0)
    model = (dense if name == DENSE else sparse)(width=options.width)
    if grid is not None:
        model = parallelize(model, grid)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    voxels = make_batch(options, resolution, 1.0 if name == DENSE else float(name.removeprefix("S-")))

    labels = voxels.labels if grid is None else placement.scatter(voxels.labels, grid, dims="n")

    def x() -> Any:
        cloud = SparseTensor(voxels.coords, voxels.features, batch_size=options.batch)
        if name != DENSE:
            return cloud if grid is None else scatter(cloud, grid=grid)
        volume = to_dense(cloud, (resolution,) * 3)
        return volume if grid is None else placement.scatter(volume, grid)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x()), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _measured_here(options: argparse.Namespace) -> Peak:
    """Measure a first step in this process, whose memory is limited to --cap.

    Raises
    ------
    DistconvError
        If the step needs more memory.
    """
    cap = options.cap << 30
    # The limit makes an allocation fail. Without it, the operating system would end other processes.
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    try:
        return measure_first_step(lambda: make_step(options, options.resolution[0], options.alone))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        raise DistconvError(f"{OUT_OF_MEMORY}: {str(error).splitlines()[0]}") from None


def _alone(options: argparse.Namespace, resolution: int, name: str) -> Peak | None:
    """Measure the memory of a variant in a process of its own; None if it exceeds --cap."""
    given = {"model": options.model, "width": options.width, "batch": options.batch, "cap": options.cap}
    words = ["pointcloud", "--alone", name, "--resolution", str(resolution)]
    try:
        return run_in_new_process(words + [word for key, value in given.items() for word in (f"--{key}", str(value))])
    except DistconvError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return None


def _compare(options: argparse.Namespace, resolution: int, grid: ProcessGrid) -> dict[str, Any]:
    """Measure and print time and memory of all variants at one resolution. Collective."""
    names = [DENSE, *(f"S-{keep:g}" for keep in options.keep)]
    peaks = run_on_rank_0(grid.world, lambda: {name: _alone(options, resolution, name) for name in names})
    fitting = [name for name in names if peaks[name] is not None]
    # All ranks have all variants, in the same order: time_interleaved waits for every rank in each of them.
    variants: dict[str, Variant] = dict.fromkeys(fitting, idle)
    if grid.rank == 0:
        variants |= timed_variants(
            {name: _preserve_random_state(make_step(options, resolution, name)) for name in fitting}
        )
    if grid.size > 1:
        variants |= timed_variants(
            {f"{name}, {grid.size} ranks": make_step(options, resolution, name, grid) for name in fitting}
        )
    times = time_interleaved(grid.world, variants, options.rounds, asleep=True)
    if grid.rank == 0:
        _print(options, resolution, times, peaks)
    return {
        "voxels": {f"{keep:g}": number for keep, number in _voxels(options, resolution).items()},
        "median_s": medians(times),
        "memory_bytes": {name: None if peak is None else peak.used for name, peak in peaks.items()},
    }


def _preserve_random_state(step: Callable[[], object]) -> Callable[[], object]:
    """Return ``step`` for a single rank: it restores the random state, which the other ranks have not advanced."""

    def run() -> None:
        with torch.random.fork_rng(devices=[]):
            step()

    return run


def _voxels(options: argparse.Namespace, resolution: int) -> dict[float, int]:
    """Return the number of voxels for each fraction of the points."""
    return {keep: len(make_batch(options, resolution, keep).coords) for keep in options.keep}


def _print(
    options: argparse.Namespace, resolution: int, times: Mapping[str, list[float]], peaks: Mapping[str, Peak | None]
) -> None:
    reference = statistics.median(times[DENSE]) if DENSE in times else None
    voxels = _voxels(options, resolution).items()
    shares = ", ".join(f"p={k:g} {n} ({n / options.batch / resolution**3:.2%})" for k, n in voxels)
    print(f"\n{resolution}^3, voxels: {shares}\n{report.table_head(ratio='to D-1')}")
    for name, seconds in times.items():
        peak = peaks.get(name)
        print(report.time_row(name, seconds, reference) + (f"  {peak.used / MIB:8.0f} MiB" if peak else ""))
    for name in (name for name, peak in peaks.items() if peak is None):
        print(f"{name:<44} more than --cap {options.cap} GiB: not run")
