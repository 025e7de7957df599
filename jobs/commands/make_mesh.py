"""Make mesh-tangling samples with the Lagrangian hydrodynamics code.

All ranks share the simulations. An interrupted run resumes if the same command is started again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpi4py import MPI
from tqdm import tqdm

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.picture import draw_sample
from distconv.jobs.mesh.recipe import CHANNELS, TAU

if TYPE_CHECKING:
    from distconv.jobs.mesh.production.run import LabelledSnapshot

EXAMPLES = """\
examples:
  distconv data mesh --size 128 --samples 48 --out mesh.h5
  mpiexec -n 4 distconv data mesh --size 1024 --samples 1 --heldout 0 --out large.h5
  distconv data mesh --size 2048 --measure-steps 10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv data mesh``."""
    parser.add_argument("--size", type=int, default=128, help="mesh cells along each side (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=48, help="number of training samples (default: %(default)s)")
    parser.add_argument(
        "--heldout", type=int, help="number of held-out samples, from other simulations (default: a third of --samples)"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="HDF5 file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial conditions (default: %(default)s)")
    parser.add_argument(
        "--tau",
        type=float,
        default=TAU,
        help="simulated time after a sample within which its labels look for tangled cells (default: %(default)s)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.4,
        help="scaled Jacobian below which a cell is labelled positive (default: %(default)s)",
    )
    parser.add_argument(
        "--measure-steps", type=int, metavar="N", help="only time N simulation steps at this size, and print their cost"
    )


def run(options: argparse.Namespace) -> int:
    """Generate the file, or measure steps. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--out`` is missing and ``--measure-steps`` is not given.
    """
    comm = MPI.COMM_WORLD
    if options.measure_steps is not None:
        return _measure(options)
    if options.out is None:
        raise DataError(
            "--out: missing. Name the file, for example: distconv data mesh --size 128 --samples 48 --out mesh.h5"
        )
    folder = Path(options.out).parent
    try_on_all_ranks(comm, lambda: os.makedirs(folder, exist_ok=True), DataError)
    summary = dataset.generate(
        options.out,
        size=options.size,
        samples=options.samples,
        heldout=options.heldout,
        tau=options.tau,
        threshold=options.threshold,
        seed=options.seed,
        comm=comm,
        on_first_sample=lambda family, sample: _show_first(options.out, family, sample),
    )
    if comm.rank == 0:
        print(summary)
    return 0


def _show_first(out: Path, family: str, sample: LabelledSnapshot) -> None:
    """Draw a sample to an image file next to the data set, and print its name.

    An existing file is kept. A failure does not end the job, whose other ranks still simulate.
    """
    path = out.with_suffix(".png")
    if path == out or path.exists():
        return
    channel = CHANNELS.index("minimum Jacobian")
    try:
        draw_sample(path, sample.channels[channel], sample.label, CHANNELS[channel], family)
        text = f"figure of the first sample: {path}"
    except (ImportError, OSError) as error:
        text = f"no figure of the first sample: {error}"
    tqdm.write(text, file=sys.stderr)


def _measure(options: argparse.Namespace) -> int:
    if options.measure_steps < 1 or options.size < 16:
        raise DataError(
            f"--measure-steps {options.measure_steps} --size {options.size}: at least 1 step and 16 cells are required"
        )
    if MPI.COMM_WORLD.rank == 0:
        print(dataset.step_cost(options.size, options.measure_steps))
    return 0
