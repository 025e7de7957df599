"""Make a file of labelled point clouds: embedded shapes, or points of a folder of files.

All ranks share the clouds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.pointcloud.clouds import Clouds
from distconv.jobs.pointcloud.datafile import made_from, write_clouds
from distconv.jobs.pointcloud.folders import convert
from distconv.jobs.pointcloud.sampling import CACHED_POINTS
from distconv.jobs.pointcloud.shapes import Shapes

EXAMPLES = """\
examples:
  distconv data pointcloud --samples 1000 --out shapes.h5
  mpiexec -n 4 distconv data pointcloud --off ModelNet10 --out modelnet10.h5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv data pointcloud``."""
    parser.add_argument("--samples", type=int, default=1000, help="number of training clouds (default: %(default)s)")
    parser.add_argument("--heldout", type=int, help="number of held-out clouds (default: a fifth of --samples)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the embedded shapes (default: %(default)s)")
    parser.add_argument(
        "--off",
        type=Path,
        metavar="FOLDER",
        help="sample the OFF, PLY, NPY and NPZ files in CLASS/train and CLASS/test of this folder, instead of shapes",
    )
    parser.add_argument("--points", type=int, default=CACHED_POINTS, help="points of each cloud (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="HDF5 file to write")


def run(options: argparse.Namespace) -> int:
    """Write the file, or leave it if it is there. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--out`` is missing, or a number is out of range.
    """
    if options.out is None:
        raise DataError("--out: missing. Name the file, for example: distconv data pointcloud --out shapes.h5")
    heldout = options.samples // 5 if options.heldout is None else options.heldout
    if min(options.samples, options.points) < 1 or min(heldout, options.seed) < 0:
        raise DataError(
            f"--samples {options.samples} --heldout {heldout} --points {options.points} --seed "
            f"{options.seed}: at least 1 training cloud and 1 point are required, and no value may be negative"
        )
    comm, start = MPI.COMM_WORLD, time.perf_counter()
    if options.off:
        written = convert(options.off, options.out, comm, options.points)
    else:
        groups: dict[str, Clouds] = {"train": Shapes(options.samples, options.points, seed=options.seed)}
        if heldout:
            groups["test"] = Shapes(heldout, options.points, seed=options.seed, group=1)
        source = f"shapes ({options.samples} train, {heldout} test), {options.points} points each, seed {options.seed}"
        written = write_clouds(options.out, groups, comm, source=source)
    if comm.rank == 0:
        done = f"{time.perf_counter() - start:.1f} s" if written else "exists already"
        print(f"{options.out}: {made_from(options.out)} ({done})")
    return 0
