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
EMPTY = "no-elements"
FAMILIES = (*TABLE, OPERATORS)
SAMPLES = (FAMILY, DTENSOR)

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
        "--family", nargs="+", choices=names, metavar="NAME", help=f"only these families of cases: {', '.join(names)}"
    )
    parser.add_argument("--operator", nargs="+", metavar="NAME", help="only operators with these names")
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
    run_on_rank_0(comm, lambda: _check_files(options))
    families: list[str] = options.family or list(FAMILIES)
    of_samples = set(families) <= set(SAMPLES)
    if not of_samples and set(families) & set(SAMPLES):
        raise DataError(f"the samples of {' and '.join(SAMPLES)} run without other families: take two commands")
    lines = _here(comm, families, options) if options.ranks is None else _in_jobs(families, options)
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


def _here(comm: MPI.Intracomm, families: Sequence[str], options: argparse.Namespace) -> list[Line]:
    if DTENSOR in families and len(families) > 1:
        raise DataError(f"--family {' '.join(families)} takes a job for each: start them with --ranks")
    groups = chosen(families, options.operator, options.samples)
    lines = launch.run(_job(comm, families), groups, options.journal, _tell)
    if comm.rank == 0:
        print(f"{comm.size} ranks: {journal.totals(lines)}", flush=True)
    return lines


def _job(comm: MPI.Intracomm, families: Sequence[str]) -> CaseRun:
    if DTENSOR not in families:
        return CaseRun(comm)
    # Not every build of torch has it.
    from distconv.jobs.verification.conformance import dtensor

    return dtensor.DTensorRun(comm)


def _tell(lines: Sequence[Line]) -> None:
    print(*journal.describe_lines(lines), sep="\n", flush=True)


def _in_jobs(families: Sequence[str], options: argparse.Namespace) -> list[Line]:
    words = ["--operator", *options.operator] if options.operator else []
    words += ["--samples", str(options.samples)] if options.samples else []
    with tempfile.TemporaryDirectory() as folder:
        path = options.journal or Path(folder) / "journal"
        for ranks in options.ranks:
            for own in _jobs(families, first=ranks == options.ranks[0]):
                launch.past_hangs(options.mpiexec, ranks, ["verify", "conformance", "--family", *own, *words], path)
        lines = journal.Journal(path).lines
    order = {family: number for number, family in enumerate(families)}
    lines = [line for line in lines if line.family in order and line.ranks in options.ranks]
    return sorted(lines, key=lambda line: order[line.family])


def _jobs(families: Sequence[str], first: bool) -> list[list[str]]:
    """Return the families of each job on one of the rank counts, the ``first`` or another."""
    # The operators run once, in addition to the table, which varies more. DTensor is for comparison only.
    once = [*([OPERATORS] if set(families) & set(TABLE) else []), DTENSOR]
    own = [family for family in families if family != DTENSOR and (first or family not in once)]
    return [job for job in (own, [DTENSOR] if DTENSOR in families and first else []) if job]


def chosen(
    families: Sequence[str], operators: Sequence[str] | None, most: int | None = None
) -> Iterator[tuple[str, Iterable[Case]]]:
    """Yield the selected cases, in groups of one family that are reported at once.

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
    there = {case.operator for cases in TABLE.values() for case in cases}
    if not set(operators or ()) <= there or not set(families) <= set(TABLE):
        there.update(samples.names())
    unknown = sorted(name for name in operators or () if not any(_asked(each, [name]) for each in there))
    if unknown:
        raise DataError(f"the table has no operator {unknown[0]!r}; it has {', '.join(sorted(there))}")
    for family in families:
        for case in TABLE.get(family, ()):
            if _asked(case.operator, operators):
                yield family, [case]
        for name in samples.names() if family not in TABLE else ():
            if _asked(name, operators):
                yield family, _of_torch(family, name, most)


def _of_torch(family: str, name: str, most: int | None) -> Iterator[Case]:
    if family == OPERATORS:
        return samples.largest(name)
    return samples.emptied(name) if family == EMPTY else samples.samples(name, most)


def _asked(name: str, operators: Sequence[str] | None) -> bool:
    return operators is None or name in operators or name.removeprefix("nn.functional.") in operators
