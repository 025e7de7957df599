"""``distconv conformance``: every operator and option on every kind of grid against one process (plain torch, float64).

Results, the gradients of all inputs and parameters, and buffers are compared. A line says exact, redistributes (bytes
that redistributions moved, forward and backward, all ranks), raises (with the way out), refused as torch does, or
WRONG: a difference, an error that is none of distconv's, that differs between ranks, or that names no way out.
The exit code is 1 if any line is WRONG.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.verification.conformance import page, report
from distconv.jobs.verification.conformance.case import Case
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.runner import Line, Run, Verdict

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv conformance
  mpiexec -n 4 distconv conformance --family convolution pooling --json found.json
  mpiexec -n 3 distconv conformance --operator max_pool2d
  distconv verify conformance --page docs/conformance.md --ranks 2,3,4,6,8       # docs/conformance.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv conformance``."""
    parser.add_argument("--family", nargs="+", choices=list(TABLE), metavar="NAME", help=", ".join(TABLE))
    parser.add_argument("--operator", nargs="+", metavar="NAME", help="only operators of these names")
    parser.add_argument("--markdown", metavar="FILE", help="write the page for this number of ranks")
    parser.add_argument("--json", metavar="FILE", help="write every line as an object")


def run(options: argparse.Namespace) -> int:
    """Run the cases that were asked for. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    conformance, lines = Run(comm), list[Line]()
    for family, cases in chosen(options.family, options.operator):
        if comm.rank == 0:
            print(f"== {family}", flush=True)
        for case in cases:
            found = list(conformance.lines(family, case))
            lines += found
            if comm.rank == 0:
                print(*report.described(found), sep="\n", flush=True)
    if comm.rank == 0:
        if options.json:
            report.write_json(options.json, lines)
        if options.markdown:
            Path(options.markdown).write_text(page.page(lines))
        print(f"{comm.size} ranks: {report.totals(lines)}", flush=True)
    return 1 if any(line.verdict is Verdict.WRONG for line in lines) else 0


def chosen(families: Sequence[str] | None, operators: Sequence[str] | None) -> Iterator[tuple[str, tuple[Case, ...]]]:
    """The part of the table that is asked for.

    Raises
    ------
    DataError
        If an operator is not in the table.
    """
    known = {case.operator for cases in TABLE.values() for case in cases}
    unknown = sorted(set(operators or ()) - known)
    if unknown:
        raise DataError(f"the table has no operator {unknown[0]!r}; it has {', '.join(sorted(known))}")
    for family in families or TABLE:
        cases = tuple(case for case in TABLE[family] if not operators or case.operator in operators)
        if cases:
            yield family, cases
