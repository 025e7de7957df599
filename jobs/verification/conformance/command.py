"""Every operator and option on every kind of grid against one process (plain torch, float64).

Results, the gradients of all inputs and parameters, and buffers are compared. A line says exact, redistributes (bytes
that redistributions moved, forward and backward, all ranks), raises (with the way out), refused as torch does, or
WRONG: a difference, an error that is none of distconv's, that differs between ranks, or that names no way out.
``replicates`` is exact, but every rank computed the whole. The exit code is 1 if any line is WRONG.

``--family torch-samples`` runs the samples that torch tests its own operators and modules with instead, ``--family
dtensor`` the same through torch's DTensor.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError, DistconvError
from distconv.jobs.planning.options import check_writable, on_rank_0
from distconv.jobs.training.options import natural
from distconv.jobs.verification.conformance import page, report
from distconv.jobs.verification.conformance.case import Case
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.runner import BAD, Line, Run
from distconv.jobs.verification.differential import launch
from distconv.jobs.verification.torch_samples import command as torch_samples
from distconv.jobs.verification.torch_samples import page as torch_samples_page
from distconv.jobs.verification.torch_samples.command import RUNS as SAMPLES
from distconv.whole_files import write_file

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify conformance
  mpiexec -n 4 distconv verify conformance --family convolution pooling --json found.json
  mpiexec -n 3 distconv verify conformance --operator max_pool2d
  distconv verify conformance --family torch-samples --ranks 2,3,4 --json found.json
  distconv verify conformance --family torch-samples dtensor --ranks 2 --samples 4 --page docs/evidence/torch-samples.md
  distconv verify conformance --page docs/evidence/conformance.md --ranks 2,3,4,6,8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv verify conformance``."""
    parser.add_argument(
        "--family", nargs="+", choices=[*TABLE, *SAMPLES], metavar="NAME", help=", ".join([*TABLE, *SAMPLES])
    )
    parser.add_argument("--operator", nargs="+", metavar="NAME", help="only operators of these names")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables as a page in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every line as an object")
    parser.add_argument("--samples", type=natural, metavar="N", help="of torch's samples: the first N of each operator")
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="of torch's samples: note lines as they come; go on behind them",
    )
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the cases that were asked for, here or in jobs of their own. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    on_rank_0(comm, lambda: _check_files(options))
    lines = _found(comm, options)
    if comm.rank == 0:
        if options.json:
            report.write_json(options.json, lines)
        if options.page:
            samples = _of_samples(options)
            text = torch_samples_page.page(lines, options.samples) if samples else page.page(lines)
            write_file(options.page, text)
    return 1 if any(line.verdict in BAD for line in lines) else 0


def _found(comm: MPI.Intracomm, options: argparse.Namespace) -> list[Line]:
    if _of_samples(options):
        return torch_samples.lines(comm, options)
    cases = list(chosen(options.family, options.operator))
    return _run(comm, cases) if options.ranks is None else _started(options)


def _of_samples(options: argparse.Namespace) -> bool:
    """Whether samples of torch were asked for.

    Raises
    ------
    DataError
        If cases of the table were, too.
    """
    chosen = [family in SAMPLES for family in options.family or ()]
    if any(chosen) and not all(chosen):
        raise DataError(f"the samples of {' and '.join(SAMPLES)} run without other families: take two commands")
    return any(chosen)


def _check_files(options: argparse.Namespace) -> None:
    for option, path in ("--json", options.json), ("--page", options.page), ("--journal", options.journal):
        if path is not None:
            check_writable(option, path)


def _run(comm: MPI.Intracomm, families: Iterable[tuple[str, tuple[Case, ...]]]) -> list[Line]:
    conformance, lines = Run(comm), list[Line]()
    for family, cases in families:
        if comm.rank == 0:
            print(f"== {family}", flush=True)
        for case in cases:
            found = list(conformance.lines(family, case))
            lines += found
            if comm.rank == 0:
                print(*report.described(found), sep="\n", flush=True)
    if comm.rank == 0:
        print(f"{comm.size} ranks: {report.totals(lines)}", flush=True)
    return lines


def _started(options: argparse.Namespace) -> list[Line]:
    arguments = ["verify", "conformance"]
    for name in ("family", "operator"):
        arguments += [f"--{name}", *getattr(options, name)] if getattr(options, name) else []
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            found = Path(folder) / f"{ranks}.json"
            code = launch.start(options.mpiexec, ranks, [*arguments, "--json", str(found)])
            if not found.exists():
                raise DistconvError(f"the job on {ranks} ranks ended with exit code {code} before it was done")
            lines += report.read_json(found)
    return lines


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
