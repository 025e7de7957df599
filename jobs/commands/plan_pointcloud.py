"""Choose how ranks split the clouds and the space of a sparse network, for the shortest predicted training step.

Counts the voxels of the first mini-batch of training clouds, layer by layer, under every grid of samples (n) and space
(d, h, w). Prints the grids, fastest first: time of a step in ms (compute; maps: search for pairs of voxels; halo:
features of other ranks' sites; sync: reductions of batch norm; BPa: all-reduce of gradients), peak memory in GB on the
rank with the most, and load imbalance (pairs on the busiest rank divided by the mean over ranks). Runs on one rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from mpi4py import MPI

from distconv.jobs.commands.train_pointcloud import add_cloud_arguments
from distconv.jobs.planning.options import add_machine_argument, quantity_parser, run_on_rank_0
from distconv.jobs.pointcloud.batches import VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.classification.trainer import CloudSettings, build_network
from distconv.jobs.training.options import positive_int
from distconv.layers.sparse import SparseTensor
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.units import Memory
from distconv.perfmodel.sparse.grids import GridChoice, select_grid
from distconv.perfmodel.sparse.recording import SparseRecording, record

EXAMPLES = """\
examples:
  distconv plan pointcloud --ranks 4 --machine localhost
  distconv plan pointcloud --model vgg16_bn --width 32 --resolution 100 --batch 8 --ranks 16 --machine lassen
"""

FIGURES = ("compute", "maps", "halo", "sync", "allreduce")

OPTIMIZER_SLOTS = 2
"""Tensors of state per parameter in Adam, the default optimizer of ``distconv train pointcloud``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv plan pointcloud``."""
    defaults = CloudSettings()
    add_cloud_arguments(parser, defaults)
    parser.add_argument(
        "--width", type=positive_int, default=defaults.width, help="channels of the first layer (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive_int, default=defaults.batch, help="point clouds per step (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=positive_int, required=True, help="number of ranks that will train")
    add_machine_argument(parser, required=True)
    parser.add_argument(
        "--memory",
        type=quantity_parser(Memory),
        metavar="16GB",
        help="memory limit of each rank, with its unit (default: the machine's)",
    )


def run(options: argparse.Namespace) -> int:
    """Count, predict and print, all on rank 0. Collective over MPI.COMM_WORLD."""
    run_on_rank_0(MPI.COMM_WORLD, partial(_plan, options))
    return 0


def _plan(options: argparse.Namespace) -> None:
    machine = Machine.load(options.machine)
    memory = options.memory or machine.memory_bytes
    recording = _recorded(options)
    choice = select_grid(recording, machine, options.ranks, memory, optimizer_slots=OPTIMIZER_SLOTS)
    print(
        f"{options.model}: {recording.batch_size} clouds with {len(recording.sites.coords)} voxels of "
        f"{options.resolution}^3, on {options.ranks} ranks of {machine.name} ({machine.ranks_per_node} per node) with "
        f"at most {memory / 1e9:.4g} GB each"
    )
    for line in _table(choice, memory):
        print(line)
    print(
        f"train with it: mpiexec -n {options.ranks} distconv train pointcloud {_settings(options)} "
        f"--grid {choice.best.grid.describe()}"
    )


def _recorded(options: argparse.Namespace) -> SparseRecording:
    """Record the network's operations on the first clouds."""
    names = ("model", "width", "batch", "resolution", "points", "keep", "varied")
    settings = CloudSettings(**{name: getattr(options, name) for name in names})
    with closing(CloudSamples(options.data, MPI.COMM_SELF)) as samples:
        clouds = samples.groups["train"]
        recipe = VoxelRecipe(settings.resolution, settings.points, settings.keep, settings.varied, seed=settings.seed)
        voxels = voxel_batch(clouds, range(min(settings.batch, len(clouds.labels))), recipe, epoch=0)
        x = SparseTensor(voxels.coords, voxels.features, batch_size=len(voxels.labels))
        return record(build_network(settings, samples), x)


def _table(choice: GridChoice, memory: float) -> Iterator[str]:
    yield f"  {'grid':<16}{'ms per step':>12}{''.join(f'{name:>11}' for name in FIGURES)}{'GB':>9}{'busiest':>9}"
    for row in choice.ranking:
        times = "".join(f"{1e3 * getattr(row, name):>11.3f}" for name in FIGURES)
        fits = "" if row.memory <= memory else "  does not fit"
        shape = row.grid.describe()
        yield (
            f"  {shape:<16}{1e3 * row.time:>12.3f}{times}{row.memory / 1e9:>9.3f}"
            f"{row.pairs * row.grid.size:>8.2f}x{fits}"
        )


def _settings(options: argparse.Namespace) -> str:
    data = f"--data {options.data} " if options.data else ""
    return (
        f"{data}--model {options.model} --width {options.width} --batch {options.batch} "
        f"--resolution {options.resolution} --points {options.points} --keep {options.keep}"
        f"{' --varied' if options.varied else ''}"
    )
