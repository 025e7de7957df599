"""Runs samples over the ranks of a job on every split, and says what came of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mpi4py import MPI

from distconv.grid import ProcessGrid
from distconv.jobs.verification.conformance.runner import Line, Verdict, names_a_way_out
from distconv.jobs.verification.differential.verdicts import Outcome, Refusal, difference
from distconv.jobs.verification.differential.watch import Watch
from distconv.jobs.verification.torch_samples.attempt import Found, Split, attempt
from distconv.jobs.verification.torch_samples.database import Sample

TIME_LIMIT_S = 30.0

FAMILY, DTENSOR = "torch-samples", "dtensor"
"""What lines of distconv, and of torch's DTensor, are found under."""


class _Part(NamedTuple):
    """One rank's share of a line."""

    outcome: Outcome
    sent: Counter[str]
    reduced: int
    warned: bool


class Run:
    """A run on the ranks of ``comm``."""

    def __init__(self, comm: MPI.Intracomm, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.comm = comm
        self._private = comm.Dup()
        self._watch = Watch(comm, time_limit_s)
        self._grids = {extents: ProcessGrid(comm, **dict(extents)) for extents in _arrangements(comm.size)}

    def keys(self, sample: Sample) -> list[tuple[Split, ProcessGrid]]:
        """The splits of ``sample``."""
        found = []
        for (n, w), grid in ((dict(extents).values(), grid) for extents, grid in self._grids.items()):
            for every in (True, False) if sample.tensors() > 1 else (True,):
                name = {(True, False): "first", (False, True): "last", (True, True): "both"}[n > 1, w > 1]
                shown = name if every else f"{name}, first tensor only"
                found.append((Split(shown, "n" if n > 1 else None, "w" if w > 1 else None, every), grid))
        return found

    def lines(self, sample: Sample) -> Iterator[Line]:
        """What comes of ``sample`` on every split; nothing where torch itself refuses it. Collective."""
        reference = attempt(sample, lambda failed: failed, None, None)
        if reference.refused is not None:
            return
        with self._watch.running():
            for split, grid in self.keys(sample):
                yield self._line(sample, split, grid, reference)

    def _together(self, failed: bool) -> bool:
        return bool(self._private.allreduce(failed, MPI.LOR))

    def _line(self, sample: Sample, split: Split, grid: ProcessGrid, reference: Found) -> Line:
        self._watch.begin(f"{sample.name}, {split.name}")
        found = attempt(sample, self._together, split, grid)
        compared = "" if found.refused else difference(reference.values, found.values)
        outcome = Outcome(found.refused, compared)
        parts = self._private.allgather(
            _Part(outcome, found.traffic.sent, sum(found.traffic.reduced.values()), found.warned)
        )
        verdict, text = _judged(parts)
        sent: Counter[str] = sum((part.sent for part in parts), Counter())
        moved = sum(count for what, count in sent.items() if what.startswith("redistribution"))
        if verdict is Verdict.EXACT and any(part.warned for part in parts):
            verdict = Verdict.REPLICATES
        elif verdict is Verdict.EXACT and moved:
            verdict = Verdict.REDISTRIBUTES
        place = (FAMILY, sample.operator, sample.option, split.name, grid.describe(), self.comm.size)
        return Line(*place, verdict, text, moved, sent.total() - moved, sum(part.reduced for part in parts))


def _arrangements(ranks: int) -> list[tuple[tuple[str, int], ...]]:
    """All along the first dimension, all along the last, and two by the others along both."""
    found = [(ranks, 1), (1, ranks)] + ([(2, ranks // 2)] if ranks % 2 == 0 and ranks > 2 else [])
    return [(("n", n), ("w", w)) for n, w in found]


def _judged(parts: list[_Part]) -> tuple[Verdict, str]:
    refusals: dict[Refusal | None, int] = {}
    for rank, part in enumerate(parts):
        refusals.setdefault(part.outcome.refusal, rank)
    if len(refusals) > 1:
        told = (f"rank {rank}: {'computes' if r is None else f'{r.kind}: {r.text}'}" for r, rank in refusals.items())
        return Verdict.WRONG, "ranks differ: " + "; ".join(told)
    (common,) = refusals
    if common is None:
        texts = list(dict.fromkeys(part.outcome.difference for part in parts if part.outcome.difference))
        return (Verdict.WRONG, "; ".join(texts)) if texts else (Verdict.EXACT, "")
    if common.on_purpose and names_a_way_out(common.text):
        return Verdict.RAISES, common.text
    return Verdict.UNCLEAR, f"{common.kind}: {common.text}"
