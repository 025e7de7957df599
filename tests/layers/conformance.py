"""torch's own samples of the operators of a folder of layers, and the conformance table, on two or more ranks.

The tests of each folder run those of its operators, so that a change of one module is noticed by the tests beside it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial

from mpi4py import MPI

from distconv.dispatch import rule_of
from distconv.jobs.verification.conformance import samples
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.jobs.verification.engine.runner import Case, CaseRun
from distconv.jobs.verification.engine.verdicts import BAD


class FewLayouts(CaseRun):
    """Computes each case in ``most`` of its layouts, selected by a hash of its name."""

    def __init__(self, comm: MPI.Intracomm, most: int) -> None:
        super().__init__(comm)
        self.most = most

    def layouts(self, case: Case) -> Sequence[CaseLayout]:
        """Return ``most`` of the layouts of a case, evenly spaced."""
        found = super().layouts(case)
        first = zlib.crc32(f"{case.operator} {case.option}".encode())
        step = max(1, len(found) // self.most)
        return [found[(first + step * k) % len(found)] for k in range(min(self.most, len(found)))]


def folder_of(function: object) -> str | None:
    """Return the folder of ``layers`` whose module registers an operator for a torch function."""
    rule = rule_of(function) if function is not None else None
    if rule is None:
        return None
    operator = rule.operator
    while isinstance(operator, partial):
        operator = operator.func
    parts = str(getattr(operator, "__module__", "")).split(".")
    return parts[2] if parts[:2] == ["distconv", "layers"] and len(parts) > 3 else None


@cache
def sampled_operators(folder: str) -> tuple[str, ...]:
    """Return the names of torch's samples whose operators are in a folder."""
    found = []
    for name, infos in samples._databases().items():
        info = infos[0]
        functions = [getattr(info, way, None) for way in ("op", "method_variant", "inplace_variant")]
        folders = {folder_of(function) for function in functions} | ({"nn"} if name.startswith("nn.") else set())
        if folder in folders:
            found.append(name)
    return tuple(found)


def sampled_cases(folder: str) -> Iterator[Case]:
    """Yield two of the largest samples of each operator of a folder: one as it is, one in place if it can be."""
    for name in sampled_operators(folder):
        yield from itertools.islice(samples.largest(name), 2)


def table_cases(*families: str) -> Iterator[Case]:
    """Yield the cases of some families of the conformance table."""
    for family in families:
        yield from TABLE[family]


def wrong_lines(comm: MPI.Intracomm, cases: Iterable[Case], most: int = 1) -> list[str]:
    """Return a line for each case and layout whose values, gradients or errors are not torch's. Collective."""
    run = FewLayouts(comm, most)
    return [
        f"{line.operator} {line.option}, {line.layout}: {line.verdict.value} {line.text}"
        for case in cases
        for line in run.lines("", case)
        if line.verdict in BAD
    ]
