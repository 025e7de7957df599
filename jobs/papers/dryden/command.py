"""The page of the strong-scaling tables and single layers of Dryden et al. 2019, predicted and published.

Five constants of the machine ``lassen`` are fitted to two rows of Table I anew; everything else is predicted.

Source: Dryden et al. 2019, VI-A, and VI-B, Tables I, II and III.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpi4py import MPI

from distconv.jobs.papers.dryden.page import page
from distconv.jobs.papers.dryden.predictions import Results
from distconv.jobs.planning.options import check_writable, on_rank_0
from distconv.perfmodel.machine.machine import Machine
from distconv.whole_files import write_file

EXAMPLES = """\
examples:
  distconv reproduce dryden
  distconv reproduce dryden --out docs/evidence/paper-tables.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv reproduce dryden``."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here instead of printing it")


def run(options: argparse.Namespace) -> int:
    """Print the page on rank 0, or write it. Collective over MPI.COMM_WORLD."""
    on_rank_0(MPI.COMM_WORLD, lambda: _page(options.out))
    return 0


def _page(path: Path | None) -> None:
    if path is not None:
        check_writable("--out", path)
    print("fitting the machine and predicting all rows: about four minutes", file=sys.stderr, flush=True)
    text = page(Results.of(Machine.load("lassen")))
    if path is not None:
        write_file(path, text)
    else:
        print(text, end="")
