"""Make mesh-tangling samples with the Lagrangian hydrodynamics code, on all ranks; can be interrupted and resumed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mpi4py import MPI

from distconv.communication.agreement import together
from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.recipe import TAU

EXAMPLES = """\
examples:
  distconv data mesh --size 128 --samples 48 --out mesh.h5
  mpiexec -n 4 distconv data mesh --size 1024 --samples 1 --heldout 0 --out large.h5
  distconv data mesh --size 2048 --measure-steps 10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv data mesh``."""
    parser.add_argument("--size", type=int, default=128, help="cells along each side (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=48, help="training samples (default: %(default)s)")
    parser.add_argument("--heldout", type=int, help="more samples, from other runs (default: a third as many)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="HDF5 file to write")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--tau", type=float, default=TAU, help="time that labels look ahead (default: %(default)s)")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.4,
        help="scaled Jacobian below which a cell is positive (default: %(default)s)",
    )
    parser.add_argument(
        "--measure-steps", type=int, metavar="N", help="only time N steps at this size and print their cost"
    )


def run(options: argparse.Namespace) -> int:
    """Generate the file, or measure steps. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--out`` is missing where a file is to be made.
    """
    comm = MPI.COMM_WORLD
    if options.measure_steps is not None:
        return _measure(options)
    if options.out is None:
        raise DataError(
            "data mesh needs --out PATH, for example: distconv data mesh --size 128 --samples 48 --out mesh.h5"
        )
    folder = Path(options.out).parent
    together(comm, lambda: os.makedirs(folder, exist_ok=True), DataError)
    summary = dataset.generate(
        options.out,
        size=options.size,
        samples=options.samples,
        heldout=options.heldout,
        tau=options.tau,
        threshold=options.threshold,
        seed=options.seed,
        comm=comm,
    )
    if comm.rank == 0:
        print(summary)
    return 0


def _measure(options: argparse.Namespace) -> int:
    if options.measure_steps < 1 or options.size < 16:
        raise DataError(
            f"--measure-steps {options.measure_steps} at --size {options.size}: at least 1 step and 16 cells are needed"
        )
    if MPI.COMM_WORLD.rank == 0:
        print(dataset.step_cost(options.size, options.measure_steps))
    return 0
