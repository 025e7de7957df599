"""Runs cases one after the other on the ranks of a job, with a time limit on each."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from distconv.grid import ProcessGrid
from distconv.jobs.verification.differential import networks, operators
from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.verdicts import Outcome, Refusal, Verdict, difference, judge, refusal
from distconv.jobs.verification.differential.watch import Watch
from distconv.jobs.verification.differential.worlds import RanksWorld, World, draw_extents

TIME_LIMIT_S = 60.0
KINDS = {"operators": (operators.draw,), "networks": (networks.draw,), "all": (operators.draw, networks.draw)}
_NETWORKS_AMONG_ALL = 0.25


def draw_case(seed: int, index: int, kind: str) -> Program:
    """Case number ``index``; ``kind`` is one of KINDS."""
    draw = Draw(seed, index)
    kinds = KINDS[kind]
    return kinds[-1 if draw.chance(_NETWORKS_AMONG_ALL) else 0](draw)


@dataclass
class Tally:
    """Verdicts counted, in all and per name of a program."""

    per_name: dict[str, Counter[Verdict]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why programs were turned away that torch runs, or refuses in other words."""

    def add(self, name: str, verdict: Verdict, text: str) -> None:
        """Count one verdict; the words of a refusal are counted too."""
        self.per_name.setdefault(name, Counter())[verdict] += 1
        if verdict in (Verdict.UNSUPPORTED, Verdict.OTHER_WORDS):
            self.reasons[f"{verdict.value}: {text}"] += 1

    @property
    def total(self) -> Counter[Verdict]:
        """Verdicts counted over all programs."""
        return sum(self.per_name.values(), Counter())

    def table(self) -> str:
        """Counts per operator."""
        lines = [f"{'':24}{'exact':>8}{'refused':>9}{'unsupported':>13}{'WRONG':>7}"]
        for name, counts in sorted(self.per_name.items()):
            refused = counts[Verdict.REFUSED] + counts[Verdict.OTHER_WORDS]
            numbers = f"{counts[Verdict.EXACT]:8}{refused:9}{counts[Verdict.UNSUPPORTED]:13}{counts[Verdict.WRONG]:7}"
            lines.append(f"{name:24}{numbers}")
        return "\n".join(lines)

    def summary(self) -> str:
        """The last line of a run."""
        total = self.total
        otherwise = f"{total[Verdict.OTHER_WORDS]} in other words, " if total[Verdict.OTHER_WORDS] else ""
        return (
            f"{total.total()} cases: {total[Verdict.EXACT]} exact, {total[Verdict.REFUSED]} refused as torch does, "
            f"{otherwise}{total[Verdict.UNSUPPORTED]} unsupported, {total[Verdict.WRONG]} silent differences"
        )


class Run:
    """A differential run on the ranks of ``comm``."""

    def __init__(self, comm: MPI.Intracomm, seed: int, kind: str = "all", time_limit_s: float = TIME_LIMIT_S) -> None:
        self.comm, self.seed, self.kind = comm, seed, kind
        self.tally = Tally()
        self._private = comm.Dup()
        self._grids: dict[tuple[tuple[str, int], ...], ProcessGrid] = {}
        self._watch = Watch(comm, time_limit_s)

    def cases(self, indices: Iterable[int], *, verbose: bool = False) -> Tally:
        """Run these cases; rank 0 prints each wrong one (with ``verbose`` all) as it is found."""
        with self._watch.running():
            for index in indices:
                self._watch.begin(f"case {index}")
                name, verdict, text = self._run(index)
                self.tally.add(name, verdict, text)
                if self.comm.rank == 0 and (verbose or verdict is Verdict.WRONG):
                    print(f"{verdict.value}: {self._watch.case}: {text}\n  {self._reproduction(index)}", flush=True)
        return self.tally

    def _run(self, index: int) -> tuple[str, Verdict, str]:
        program = draw_case(self.seed, index, self.kind)
        choices = random.Random(f"{self.seed}/{index}/{self.comm.size}")
        grid = self._grid(draw_extents(self.comm.size, program.spatial, choices))
        self._watch.case = f"case {index}: {program.name} {program.text} on {grid.describe()}"
        reference, expected = self._attempt(program, World())
        other = self._grid(draw_extents(self.comm.size, program.spatial, choices))
        refused, found = self._attempt(program, RanksWorld(grid, other, choices))
        compared = "" if refused or reference else difference(expected, found)
        outcomes = self._private.allgather(Outcome(refused, compared))
        return program.name, *judge(reference, outcomes)

    @staticmethod
    def _compute(program: Program, world: World) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.run(world)

    def _attempt(self, program: Program, world: World) -> tuple[Refusal | None, dict[str, torch.Tensor]]:
        try:
            self._compute(program, world)
        except Exception as error:
            if type(world) is not World:
                self._watch.case += f" [rank {self.comm.rank}: {type(error).__name__}: {error}]"
            return refusal(error), {}
        return None, world.results

    def _grid(self, extents: dict[str, int]) -> ProcessGrid:
        key = tuple(sorted(extents.items()))
        if key not in self._grids:
            self._grids[key] = ProcessGrid(self.comm, **extents)
        return self._grids[key]

    def _reproduction(self, index: int) -> str:
        options = f"--seed {self.seed} --case {index}" + ("" if self.kind == "all" else f" --only {self.kind}")
        return f"mpiexec -n {self.comm.size} distconv verify differential {options}"
