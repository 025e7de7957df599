"""``distconv verify conformance --family torch-samples``: every sample of torch, past those that hang.

Every line is written down as it is found, so that a job which hangs or ends loses one line: the next one begins behind
it. A line says exact, redistributes or replicates (with bytes), raises, UNCLEAR (an exception that names no way out),
WRONG (another number, or ranks that part ways) or HANGS.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mpi4py import MPI

from distconv.errors import DataError, DistconvError
from distconv.jobs.verification.conformance import report
from distconv.jobs.verification.conformance.runner import Line, Verdict
from distconv.jobs.verification.differential import launch
from distconv.jobs.verification.torch_samples import database
from distconv.jobs.verification.torch_samples.database import Sample
from distconv.jobs.verification.torch_samples.runner import FAMILY, Run


def lines(comm: MPI.Intracomm, options: argparse.Namespace) -> list[Line]:
    """Run the samples that were asked for, here or in jobs of their own. Collective."""
    if options.ranks is None:
        return run(comm, options.operator, options.journal, options.samples)
    found: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            journal = options.journal or Path(folder) / f"{ranks}.jsonl"
            _past_hangs(options, ranks, journal)
            found += [line for line in Journal(journal).lines if line.ranks == ranks]
    return found


def _past_hangs(options: argparse.Namespace, ranks: int, journal: Path) -> None:
    """Start jobs until one comes to the end."""
    arguments = ["verify", "conformance", "--family", FAMILY, "--journal", str(journal)]
    arguments += ["--operator", *options.operator] if options.operator else []
    arguments += ["--samples", str(options.samples)] if options.samples else []
    while True:
        try:
            launch.start(options.mpiexec, ranks, arguments)
            return
        except DistconvError:
            if not Journal(journal).end_with_a_hang():
                raise


def run(comm: MPI.Intracomm, operators: Sequence[str] | None, path: Path | None, most: int | None = None) -> list[Line]:
    """Run the samples of ``operators`` (default: of all) that the journal does not have yet. Collective.

    ``most``: only so many of each, and of each variant.
    """
    journal = Journal(path if comm.rank == 0 else None)
    begun = comm.bcast(journal.begun)
    conformance = Run(comm)
    for name in chosen(operators):
        found: list[Line] = []
        for sample in database.samples(name, most):
            if (comm.size, sample.operator, sample.option) in begun or not sample.tensors():
                continue
            journal.begin(comm.size, sample)
            lines = list(conformance.lines(sample))
            journal.end(lines)
            found += lines
        if comm.rank == 0 and found:
            print(*described(found), sep="\n", flush=True)
    if comm.rank == 0:
        print(f"{comm.size} ranks: {report.totals(journal.lines)}", flush=True)
    return journal.lines


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
        self.begun = dict[tuple[int, str, str], bool]()
        """Each sample that has begun, and whether it has ended."""
        for entry in map(json.loads, path.read_text().splitlines() if path and path.exists() else []):
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        key = (entry["ranks"], entry["operator"], entry["option"])
        self.begun[key] = "lines" in entry
        self.lines += [report.line(each) for each in entry.get("lines", ())]

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps(entry), file=file)

    def begin(self, ranks: int, sample: Sample) -> None:
        """``sample`` begins."""
        self._note({"ranks": ranks, "operator": sample.operator, "option": sample.option})

    def end(self, lines: Sequence[Line]) -> None:
        """What began last came to ``lines``."""
        ranks, operator, option = list(self.begun)[-1]
        told = [report.plain(line) for line in lines]
        self._note({"ranks": ranks, "operator": operator, "option": option, "lines": told})

    def end_with_a_hang(self) -> bool:
        """Let the sample at which a job has ended hang; returns whether there is one."""
        if all(self.begun.values()):
            return False
        ranks, operator, option = list(self.begun)[-1]
        self.end([Line(FAMILY, operator, option, "", "", ranks, Verdict.HANGS, "the job hung or ended here")])
        return True


def described(lines: Sequence[Line]) -> Iterator[str]:
    """A line for each kind of result of one operator, with the first text of each."""
    order = list(Verdict)
    for verdict, alike in groupby(sorted(lines, key=lambda line: order.index(line.verdict)), lambda line: line.verdict):
        found = list(alike)
        moved = f" ({report.size(max(line.moved_bytes for line in found))})" if verdict is Verdict.REPLICATES else ""
        first = f": {found[0].option}, {found[0].layout}: {found[0].text.splitlines()[0]}" if found[0].text else ""
        yield f"{verdict.value:<14} {found[0].operator} x {len(found)}{moved}{first}"
