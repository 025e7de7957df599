"""Compare every operator and option on every kind of grid with one process of plain torch in float64.

Results, the gradients of all inputs and parameters, and buffers are compared. Each line has one verdict: exact,
redistributes (with the bytes that redistributions moved, forward and backward, on all ranks), replicates (exact, but
every rank computed the full result), raises (with a suggested fix), refused as torch does, WRONG (a difference, or an
error on some ranks only), UNCLEAR (an error that distconv did not raise, or without a suggested fix), or HANGS. The
exit code is 1 if any line is WRONG, UNCLEAR or HANGS. With ``--ranks`` or ``--journal``, a run resumes after a case at
which a job ended.

The family ``operators`` has the largest samples with which torch tests each of its own operators and modules.
``--family no-elements`` has samples without elements: each dimension in turn has size 0. ``--family torch-samples``
runs all samples, in all variants. ``--family dtensor`` runs them through torch's DTensor.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.planning.options import check_writable, run_on_rank_0
from distconv.jobs.training.options import nonnegative_int
from distconv.jobs.verification.conformance import page, samples, samples_page
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.samples_page import DTENSOR, FAMILY
from distconv.jobs.verification.engine import journal, launch
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.runner import Case, CaseRun
from distconv.jobs.verification.engine.verdicts import BAD
from distconv.whole_files import write_file

OPERATORS = "operators"
"""Family of the largest samples of torch's operators."""

EMPTY = "no-elements"
"""Family of samples in which a dimension has size 0."""

FAMILIES = (*TABLE, OPERATORS)
"""Families that run by default."""

SAMPLES = (FAMILY, DTENSOR)
"""Families of all samples of torch. They have a page of their own, so they do not run with other families."""

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify conformance
  mpiexec -n 4 distconv verify conformance --family convolution windows --json found.json
  mpiexec -n 3 distconv verify conformance --operator max_pool2d
  distconv verify conformance --family torch-samples --ranks 2,3,4 --json found.json
  distconv verify conformance --family torch-samples dtensor --ranks 2 --samples 4 --page docs/evidence/torch-samples.md
  distconv verify conformance --page docs/evidence/conformance.md --ranks 2,3,4,6
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify conformance``."""
    names = [*FAMILIES, EMPTY, *SAMPLES]
    parser.add_argument(
        "--family",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"only these families of cases: {', '.join(names)} (default: all up to {OPERATORS})",
    )
    parser.add_argument(
        "--operator", nargs="+", metavar="NAME", help="only operators with these names, such as conv2d (default: all)"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a Markdown page, and the tables to a .csv file next to it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this JSON file")
    parser.add_argument(
        "--samples",
        type=nonnegative_int,
        metavar="N",
        help="only the first N samples of each operator of the family torch-samples (default: all)",
    )
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the requested cases, in this job or in new jobs. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If torch's samples were requested together with other families.
    """
    comm = MPI.COMM_WORLD
    # Files are checked before the cases, which take minutes to hours. Only rank 0 writes them.
    run_on_rank_0(comm, lambda: _check_files(options))
    families: list[str] = options.family or list(FAMILIES)
    of_samples = set(families) <= set(SAMPLES)
    if not of_samples and set(families) & set(SAMPLES):
        raise DataError(
            f"--family {' '.join(families)}: {' and '.join(SAMPLES)} cannot run with other families. Use two commands."
        )
    lines = _run_here(comm, families, options) if options.ranks is None else _run_in_jobs(families, options)
    if comm.rank == 0:
        if options.json:
            journal.write_json(options.json, lines)
        if options.page:
            _write_page(options, lines, of_samples)
    return 1 if any(line.verdict in BAD for line in lines) else 0


def _write_page(options: argparse.Namespace, lines: Sequence[Line], of_samples: bool) -> None:
    if of_samples:
        write_file(options.page, samples_page.page(lines, options.samples))
        return
    data = options.page.with_suffix(".csv")
    write_file(data, page.data(lines))
    write_file(options.page, page.page(lines, data.name))


def _check_files(options: argparse.Namespace) -> None:
    for option, path in ("--json", options.json), ("--page", options.page), ("--journal", options.journal):
        if path is not None:
            check_writable(option, path)


def _run_here(comm: MPI.Intracomm, families: Sequence[str], options: argparse.Namespace) -> list[Line]:
    if DTENSOR in families and len(families) > 1:
        # A job has one CaseRun, and DTensor has its own.
        raise DataError(
            f"--family {' '.join(families)}: {DTENSOR} needs a job of its own. Start the jobs with --ranks."
        )
    groups = chosen(families, options.operator, options.samples)
    lines = launch.run(_case_run(comm, families), groups, options.journal, _print_lines)
    if comm.rank == 0:
        print(f"{comm.size} ranks: {journal.totals(lines)}", flush=True)
    return lines


def _case_run(comm: MPI.Intracomm, families: Sequence[str]) -> CaseRun:
    if DTENSOR not in families:
        return CaseRun(comm)
    # Imported here, because not every build of torch has DTensor.
    from distconv.jobs.verification.conformance import dtensor

    return dtensor.DTensorRun(comm)


def _print_lines(lines: Sequence[Line]) -> None:
    print(*journal.describe_lines(lines), sep="\n", flush=True)


def _run_in_jobs(families: Sequence[str], options: argparse.Namespace) -> list[Line]:
    arguments = ["--operator", *options.operator] if options.operator else []
    arguments += ["--samples", str(options.samples)] if options.samples else []
    with tempfile.TemporaryDirectory() as folder:
        path = options.journal or Path(folder) / "journal"
        for ranks in options.ranks:
            for own in _jobs(families, first=ranks == options.ranks[0]):
                launch.past_hangs(options.mpiexec, ranks, ["verify", "conformance", "--family", *own, *arguments], path)
        lines = journal.Journal(path).lines
    # A journal may also hold the results of earlier runs, with other families or numbers of ranks.
    order = {family: number for number, family in enumerate(families)}
    lines = [line for line in lines if line.family in order and line.ranks in options.ranks]
    return sorted(lines, key=lambda line: order[line.family])


def _jobs(families: Sequence[str], first: bool) -> list[list[str]]:
    """Return the families of each job on one of the rank counts; ``first`` is True for the first of them."""
    # On the first count only: DTensor, which is for comparison, and the operators if they run with the table, which has
    # more options and grids for each operator.
    once = [*([OPERATORS] if set(families) & set(TABLE) else []), DTENSOR]
    own = [family for family in families if family != DTENSOR and (first or family not in once)]
    return [job for job in (own, [DTENSOR] if DTENSOR in families and first else []) if job]


def chosen(
    families: Sequence[str], operators: Sequence[str] | None, most: int | None = None
) -> Iterator[tuple[str, Iterable[Case]]]:
    """Yield the selected cases in groups, each of one family. The results of a group are reported together.

    Parameters
    ----------
    families : sequence of str
        Names of families.
    operators : sequence of str or None
        Names of operators. None: all.
    most : int, optional
        Maximum number of samples of an operator. None: all.

    Yields
    ------
    (str, iterable of Case)

    Raises
    ------
    DataError
        If there is no operator of one of these names.
    """
    known = {case.operator for cases in TABLE.values() for case in cases}
    # Only if they are needed: torch's samples take seconds to import.
    if not set(operators or ()) <= known or not set(families) <= set(TABLE):
        known.update(samples.names())
    unknown = sorted(name for name in operators or () if not any(_is_selected(each, [name]) for each in known))
    if unknown:
        raise DataError(f"--operator {unknown[0]}: no such operator. Use one of {', '.join(sorted(known))}.")
    for family in families:
        for case in TABLE.get(family, ()):
            if _is_selected(case.operator, operators):
                yield family, [case]
        for name in samples.names() if family not in TABLE else ():
            if _is_selected(name, operators):
                yield family, _torch_cases(family, name, most)


def _torch_cases(family: str, name: str, most: int | None) -> Iterator[Case]:
    if family == OPERATORS:
        return samples.largest(name)
    return samples.emptied(name) if family == EMPTY else samples.samples(name, most)


def _is_selected(name: str, operators: Sequence[str] | None) -> bool:
    # torch's samples have the full name of a function, such as nn.functional.relu. Users write relu.
    return operators is None or name in operators or name.removeprefix("nn.functional.") in operators
