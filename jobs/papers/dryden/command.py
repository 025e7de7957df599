"""Predict the strong-scaling tables and single layers of Dryden et al. 2019, next to the published values.

For the pages, five constants of the machine ``lassen`` are fitted to two rows of Table I; everything else is
predicted. Single tables are printed within seconds, with the constants of the machine file.

Source: Dryden et al. 2019, VI-A, and VI-B, Tables I, II and III.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.papers.dryden.layers import section
from distconv.jobs.papers.dryden.page import pages, tables
from distconv.jobs.papers.dryden.predictions import CELLS, PredictedTimes, held_out, mean_error
from distconv.jobs.papers.dryden.published import TABLES
from distconv.jobs.planning.options import check_writable, run_on_rank_0
from distconv.perfmodel.machine.machine import Machine
from distconv.whole_files import write_file

EXAMPLES = """\
examples:
  distconv reproduce dryden --tables I
  distconv reproduce dryden --tables II III VI-A
  distconv reproduce dryden
  distconv reproduce dryden --out docs/evidence/paper-tables.md
"""


LAYERS = "VI-A"
"""Name of the single layers in ``--tables``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce dryden``."""
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=[*(table.name for table in TABLES), LAYERS],
        help="print only these tables, without fitting constants (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the pages to this file and to others whose names begin with its name, instead of printing them",
    )


def run(options: argparse.Namespace) -> int:
    """Print on rank 0, or write the page. Collective over MPI.COMM_WORLD."""
    run_on_rank_0(MPI.COMM_WORLD, lambda: _tables(options) if options.tables else _pages(options.out))
    return 0


def _tables(options: argparse.Namespace) -> None:
    if options.out is not None:
        raise DistconvError("--out: writes all tables. Remove --tables.")
    machine = Machine.load("lassen")
    # The stored constants are those that the fit finds. The fit itself would take minutes.
    print("constants of lassen.yaml, which --out fits again; published / data sheets / these constants", flush=True)
    for table in (table for table in TABLES if table.name in options.tables):
        results = PredictedTimes.of(machine, table.cells, fit=False)
        print("\n".join(tables(results, [table])))
        print(f"mean error of its held-out speed-ups: {mean_error(results.fitted.error, held_out(table.name)):.1%}\n")
    if LAYERS in options.tables:
        print("\n".join(section(machine)))


def _pages(path: Path | None) -> None:
    name = "paper-tables" if path is None else path.stem
    if path is not None:
        check_writable("--out", path)
    _print_progress(
        f"fitting five constants and predicting {len(CELLS)} cells: one to two minutes of about four; --tables I takes "
        "seconds"
    )
    results = PredictedTimes.of(Machine.load("lassen"))
    _print_progress("writing the pages; their last sections fit other choices, which takes the rest of the time")
    for file, text in pages(results, name).items():
        if path is None:
            print(text)
        else:
            write_file(path.with_name(file), text)


def _print_progress(text: str) -> None:
    # To stderr, because the pages themselves may go to stdout.
    print(text, file=sys.stderr, flush=True)
