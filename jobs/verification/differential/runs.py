"""Draws cases, each from two numbers, and counts their verdicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from distconv.grid import ProcessGrid
from distconv.jobs.verification.differential import networks, operators
from distconv.jobs.verification.differential.draw import Draw, DrawnProgram
from distconv.jobs.verification.differential.layouts import Drawn, draw_extents
from distconv.jobs.verification.engine import runner
from distconv.jobs.verification.engine.backends import ReferenceBackend
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.jobs.verification.engine.verdicts import BAD, EXACT, Verdict

TIME_LIMIT_S = 60.0
KINDS = {"operators": (operators.draw,), "networks": (networks.draw,), "all": (operators.draw, networks.draw)}
_NETWORKS_AMONG_ALL = 0.25
_FIRST_ONLY = 0.2
"""Probability that only the first tensor of one of torch's samples is distributed."""


class DrawnCase(runner.Case):
    """A program with the seed and the index that determine the program and its layout."""

    def __init__(self, program: DrawnProgram, seed: int, index: int) -> None:
        self.program, self.seed, self.index = program, seed, index
        self.operator, self.option = program.name, f"case {index}: {program.text}"
        self.as_torch_takes_it, self.condition = program.as_torch_takes_it, program.condition

    @property
    def infinite(self) -> bool:
        """Return True if an input of the program has infinite values."""
        return self.program.infinite

    def layouts(self, ranks: int) -> Sequence[CaseLayout]:
        """Return the one layout of the case."""
        # A stream of its own for each number of ranks: the program of a case is the same on all of them.
        choices = self.choices(f"layout/{ranks}")
        extents = draw_extents(ranks, self.program.spatial, choices)
        first_only = choices.random() < _FIRST_ONLY
        return [CaseLayout("drawn", tuple(extents.items()), self.program.sizes, first_only=first_only)]

    def choices(self, what: str) -> random.Random:
        """Return a source of numbers, the same on all ranks."""
        return random.Random(f"{self.seed}/{self.index}/{what}")

    def compute(self, backend: ReferenceBackend) -> None:
        """Run the program."""
        self.program.run(backend)


def draw_case(seed: int, index: int, kind: str) -> DrawnCase:
    """Return the case with an index.

    Parameters
    ----------
    seed : int
        Seed.
    index : int
        Index of the case.
    kind : str
        One of ``KINDS``.

    Returns
    -------
    DrawnCase
    """
    draw = Draw(seed, index)
    kinds = KINDS[kind]
    return DrawnCase(kinds[-1 if draw.chance(_NETWORKS_AMONG_ALL) else 0](draw), seed, index)


def drawn(seed: int, kind: str, indices: Iterable[int]) -> Iterator[tuple[str, list[DrawnCase]]]:
    """Yield the cases with the given indices, as groups of one.

    Parameters
    ----------
    seed : int
        Seed.
    kind : str
        One of ``KINDS``.
    indices : iterable of int

    Returns
    -------
    iterator of (str, list of DrawnCase)
    """
    return ((kind, [draw_case(seed, index, kind)]) for index in indices)


class DifferentialRun(runner.CaseRun):
    """A differential run on the ranks of ``comm``."""

    def backend(self, case: runner.Case, layout: CaseLayout, grid: ProcessGrid) -> ReferenceBackend:
        """Return a backend whose inputs are split at random.

        Parameters
        ----------
        case : runner.Case
        layout : CaseLayout
        grid : ProcessGrid

        Returns
        -------
        ReferenceBackend
        """
        assert isinstance(case, DrawnCase)
        choices = case.choices(f"inputs/{self.comm.size}")
        other = self.grid(tuple(draw_extents(self.comm.size, case.program.spatial, choices).items()))
        return Drawn(grid, layout, self.fails, other, choices)


def summary(lines: Sequence[Line]) -> str:
    """Return a line with the counts."""
    total = Counter(line.verdict for line in lines)
    otherwise = f"{total[Verdict.OTHER_WORDS]} in other words, " if total[Verdict.OTHER_WORDS] else ""
    exact, wrong = (sum(total[each] for each in verdicts) for verdicts in (EXACT, BAD))
    return (
        f"{len(lines)} cases: {exact} exact, {total[Verdict.REFUSED]} refused as torch does, "
        f"{otherwise}{total[Verdict.RAISES]} unsupported, {wrong} silent differences"
    )


def table(lines: Sequence[Line]) -> str:
    """Return a table of counts per operator, and the reasons of errors that differ from torch's."""
    told = [f"{'':24}{'exact':>8}{'refused':>9}{'unsupported':>13}{'WRONG':>7}"]
    columns = (EXACT, {Verdict.REFUSED, Verdict.OTHER_WORDS}, {Verdict.RAISES}, BAD)
    for name in sorted({line.operator for line in lines}):
        exact, refused, raises, wrong = (
            sum(line.operator == name and line.verdict in verdicts for line in lines) for verdicts in columns
        )
        told.append(f"{name:24}{exact:8}{refused:9}{raises:13}{wrong:7}")
    reasons = Counter(
        f"{line.verdict.value}: {line.text}" for line in lines if line.verdict in (Verdict.RAISES, Verdict.OTHER_WORDS)
    )
    return "\n".join([*told, *(f"{count} times {reason}" for reason, count in reasons.most_common(20))])
