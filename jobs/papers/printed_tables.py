"""Common parts of the commands that print a paper's tables: work on rank 0 alone, and the option ``--json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from mpi4py import MPI

from distconv.jobs.planning.options import check_writable, run_on_rank_0
from distconv.whole_files import write_file

Rows = list[dict[str, object]]
"""Results of a table, one mapping for each row. All values must be serializable to JSON."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json PATH``."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to this JSON file, too")


def print_tables(tables: Callable[[], Mapping[str, Rows]], path: Path | None) -> None:
    """Print tables on rank 0, and write their rows to a file. Collective over MPI.COMM_WORLD.

    Parameters
    ----------
    tables : callable
        Prints the tables and returns their rows by name. Called on rank 0, so it must not communicate over
        MPI.COMM_WORLD.
    path : pathlib.Path or None
        JSON file. None: only print.
    """

    def action() -> None:
        # Before the tables, some of which take hours: a wrong path is reported at once.
        if path is not None:
            check_writable("--json", path)
        rows = tables()
        if path is not None:
            write_file(path, json.dumps(rows, indent=1))

    run_on_rank_0(MPI.COMM_WORLD, action)
