"""Predict the strong-scaling tables and single layers of Dryden et al. 2019, next to the published values.

For the full page, five constants of the machine ``lassen`` are fitted to two rows of Table I; everything else is
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
from distconv.jobs.papers.dryden.page import page, tables
from distconv.jobs.papers.dryden.predictions import PredictedTimes, held_out, mean_error
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
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page to this file instead of printing it")


def run(options: argparse.Namespace) -> int:
    """Print on rank 0, or write the page. Collective over MPI.COMM_WORLD."""
    run_on_rank_0(MPI.COMM_WORLD, lambda: _tables(options) if options.tables else _page(options.out))
    return 0


def _tables(options: argparse.Namespace) -> None:
    if options.out is not None:
        raise DistconvError("--out: writes the full page. Remove --tables.")
    machine = Machine.load("lassen")
    # The stored constants are those that the fit finds. The fit itself would take minutes.
    print("constants of lassen.yaml, which --out fits again; published / data sheets / these constants", flush=True)
    for table in (table for table in TABLES if table.name in options.tables):
        results = PredictedTimes.of(machine, table.cells, fit=False)
        print("\n".join(tables(results, [table])))
        print(f"mean error of its held-out speed-ups: {mean_error(results.fitted.error, held_out(table.name)):.1%}\n")
    if LAYERS in options.tables:
        print("\n".join(section(machine)))


def _page(path: Path | None) -> None:
    if path is not None:
        check_writable("--out", path)
    _print_progress(
        "fitting five constants and predicting 89 cells: one to two minutes of about four; --tables I takes seconds"
    )
    results = PredictedTimes.of(Machine.load("lassen"))
    _print_progress("writing the page; its last section fits other choices, which takes the rest of the time")
    text = page(results)
    if path is not None:
        write_file(path, text)
    else:
        print(text, end="")


def _print_progress(text: str) -> None:
    # To stderr, because the page itself may go to stdout.
    print(text, file=sys.stderr, flush=True)
