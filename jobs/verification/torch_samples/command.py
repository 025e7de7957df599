"""``distconv verify conformance --family torch-samples``: every sample of torch, past those that hang.

Every line is written down as it is found, so that a job which hangs or ends loses one line: the next one begins behind
it. A line says exact, redistributes or replicates (with bytes), raises, UNCLEAR (an exception that names no way out),
WRONG (another number, or ranks that part ways) or HANGS. ``--family dtensor`` runs them through torch's DTensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from distconv.errors import DataError, DistconvError
from distconv.jobs.verification.conformance import report
from distconv.jobs.verification.conformance.runner import Line, Verdict
from distconv.jobs.verification.differential import launch
from distconv.jobs.verification.torch_samples import database
from distconv.jobs.verification.torch_samples.database import Sample
from distconv.jobs.verification.torch_samples.runner import DTENSOR, FAMILY, Run
from distconv.whole_files import Folder


def _dtensor(comm: MPI.Intracomm) -> Any:
    # Not every build of torch has it.
    from distconv.jobs.verification.torch_samples import dtensor

    return dtensor.Run(comm)


RUNS: dict[str, Callable[[MPI.Intracomm], Any]] = {FAMILY: Run, DTENSOR: _dtensor}
"""Who computes the samples, by the name of the family."""


def lines(comm: MPI.Intracomm, options: argparse.Namespace) -> list[Line]:
    """Run the samples that were asked for, here or in jobs of their own. Collective.

    Raises
    ------
    DataError
        If there is more than one family here: torch's DTensor needs a job for itself.
    """
    if options.ranks is None:
        if len(options.family) > 1:
            raise DataError(f"--family {' '.join(options.family)} takes a job for each: start them with --ranks")
        return run(comm, options.family[0], options.operator, options.journal, options.samples)
    with tempfile.TemporaryDirectory() as folder:
        path = options.journal or Path(folder) / "journal"
        # DTensor for comparison only: on one of the rank counts.
        for family, ranks in product(options.family, options.ranks):
            if family == FAMILY or ranks == options.ranks[0]:
                _past_hangs(options, family, ranks, path)
        found = Journal(path).lines
    return [line for line in found if line.family in options.family and line.ranks in options.ranks]


def _past_hangs(options: argparse.Namespace, family: str, ranks: int, journal: Path) -> None:
    """Start jobs until one comes to the end."""
    arguments = ["verify", "conformance", "--family", family, "--journal", str(journal)]
    arguments += ["--operator", *options.operator] if options.operator else []
    arguments += ["--samples", str(options.samples)] if options.samples else []
    while True:
        failed = None
        try:
            launch.start(options.mpiexec, ranks, arguments)
        except DistconvError as error:
            failed = error
        # An ended job may leave with the exit code of one that has found something wrong, too.
        if not Journal(journal).end_with_a_hang():
            if failed:
                raise failed
            return


def run(
    comm: MPI.Intracomm, family: str, operators: Sequence[str] | None, path: Path | None, most: int | None = None
) -> list[Line]:
    """Run the samples of ``operators`` (default: of all) that the journal does not have yet. Collective.

    ``most``: only so many of each, and of each variant.
    """
    journal = Journal(path if comm.rank == 0 else None)
    begun = comm.bcast(journal.begun)
    job = RUNS[family](comm)
    for name in chosen(operators):
        found: list[Line] = []
        for sample in database.samples(name, most):
            if (family, comm.size, sample.operator, sample.option) in begun or not sample.tensors():
                continue
            journal.begin(family, comm.size, sample)
            lines = list(job.lines(sample))
            journal.end(lines)
            found += lines
        if comm.rank == 0 and found:
            print(*described(found), sep="\n", flush=True)
    own: list[Line] = comm.bcast([line for line in journal.lines if (line.family, line.ranks) == (family, comm.size)])
    if comm.rank == 0:
        print(f"{family}, {comm.size} ranks: {report.totals(own)}", flush=True)
    return own


class _Key(NamedTuple):
    """A sample in a journal."""

    family: str
    ranks: int
    operator: str
    option: str


def chosen(operators: Sequence[str] | None) -> list[str]:
    """The names to run.

    Raises
    ------
    DataError
        If torch has no samples of one of ``operators``.
    """
    known = database.names()
    unknown = sorted(set(operators or ()) - set(known))
    if unknown:
        raise DataError(f"torch has no samples of {unknown[0]!r}; it has those of {', '.join(known)}")
    return list(operators or known)


class Journal:
    """Lines as they come, in a file if there is one: which samples have begun, and what came of them."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.lines = path, list[Line]()
        self.begun = dict[_Key, bool]()
        """Each sample that has begun, and whether it has ended."""
        for entry in map(json.loads, path.read_text().splitlines() if path and path.exists() else []):
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        key = _Key(*(entry[name] for name in _Key._fields))
        self.begun[key] = "lines" in entry
        self.lines += [report.line(each) for each in entry.get("lines", ())]

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        if self._path is not None:
            with Folder(self._path.parent) as folder, folder.extended(self._path.name) as lines:
                lines.write(json.dumps(entry) + "\n")

    def begin(self, family: str, ranks: int, sample: Sample) -> None:
        """``sample`` begins."""
        self._note(_Key(family, ranks, sample.operator, sample.option)._asdict())

    def end(self, lines: Sequence[Line]) -> None:
        """What began last came to ``lines``."""
        self._note(list(self.begun)[-1]._asdict() | {"lines": [report.plain(line) for line in lines]})

    def end_with_a_hang(self) -> bool:
        """Let the sample at which a job has ended hang; returns whether there is one."""
        if all(self.begun.values()):
            return False
        family, ranks, operator, option = list(self.begun)[-1]
        text = "the job hung or ended here"
        self.end([Line(family, operator, option, "", "", ranks, Verdict.HANGS, text)])
        return True


def described(lines: Sequence[Line]) -> Iterator[str]:
    """A line for each kind of result of one operator, with the first text of each."""
    order = list(Verdict)
    for verdict, alike in groupby(sorted(lines, key=lambda line: order.index(line.verdict)), lambda line: line.verdict):
        found = list(alike)
        moved = f" ({report.size(max(line.moved_bytes for line in found))})" if verdict is Verdict.REPLICATES else ""
        first = f": {found[0].option}, {found[0].layout}: {found[0].text.splitlines()[0]}" if found[0].text else ""
        yield f"{verdict.value:<14} {found[0].operator} x {len(found)}{moved}{first}"
