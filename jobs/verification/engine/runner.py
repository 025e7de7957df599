"""Computes cases in one process and over the ranks of a job, and returns their verdicts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from distconv.communication.transport import Traffic, count_traffic
from distconv.errors import ReplicationWarning
from distconv.grid import ProcessGrid
from distconv.jobs.verification.engine.backends import DistributedBackend, OthersRaise, ReferenceBackend
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.layouts import CaseLayout, Splittable, layouts
from distconv.jobs.verification.engine.verdicts import (
    EXACT,
    RankOutcome,
    Refusal,
    Verdict,
    classify,
    difference,
    refusal,
)
from distconv.jobs.verification.engine.watch import Watch
from distconv.layers.common import call_site

TIME_LIMIT_S = 30.0
"""Default time limit of a case on one layout."""


class Case(Splittable):
    """A computation that runs on one process and over ranks. Subclasses define :meth:`compute`."""

    operator: str
    option: str
    """Distinguishes the cases of ``operator``."""
    condition: float = 1.0
    """Factor on the tolerance of the comparison, for cases that amplify round-off."""
    as_torch_takes_it: bool = False
    """True leaves out a case that torch rejects. Otherwise distconv must reject it, too."""

    @property
    def infinite(self) -> bool:
        """Return True if an input has infinite values."""
        return False

    def layouts(self, ranks: int) -> Sequence[CaseLayout]:
        """Return the layouts of its tensors."""
        return layouts(self, ranks)

    def compute(self, backend: ReferenceBackend) -> None:
        """Compute the case and leave the results to compare in ``backend``. Collective."""
        raise NotImplementedError


class _RankPart(NamedTuple):
    """Results of one rank and the messages that it sent."""

    refused: Refusal | None
    values: dict[str, torch.Tensor]
    traffic: Traffic
    replicates: bool = False


class _Share(NamedTuple):
    """Summary of a rank's part that the other ranks receive."""

    outcome: RankOutcome
    sent: Counter[str]
    reduced: int
    replicates: bool


class CaseRun:
    """Computes cases on the ranks of ``comm``. Collective: construct it, and call its methods, on every rank."""

    def __init__(self, comm: MPI.Intracomm, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.comm = comm
        self._private = comm.Dup()  # The engine's own messages do not mix with those that a failed case has left.
        self._grids: dict[tuple[tuple[str, int], ...], ProcessGrid] = {}
        self._watch = Watch(comm, time_limit_s)

    def lines(self, family: str, case: Case) -> Iterator[Line]:
        """Compute a case in all its layouts, in order. Collective.

        Parameters
        ----------
        family : str
            Name of the family.
        case : Case

        Yields
        ------
        Line
        """
        parts: dict[Any, _RankPart] = {}
        with self._watch.running():
            for layout in self.layouts(case):
                grid = self.grid(layout.extents)
                self._watch.begin(f"{case.operator} {case.option}, {layout.kind} ({grid.describe()})")
                # The reference depends on sizes and memory format alone, so layouts that agree in both share it.
                key = layout.sizes, layout.channels_last
                if key not in parts:
                    parts[key] = self._attempt(case, ReferenceBackend(layout))
                # Each rank computes the reference itself, so all ranks return here or none does.
                if case.as_torch_takes_it and parts[key].refused:
                    return
                part = self._attempt(case, self.backend(case, layout, grid))
                place = (family, case.operator, case.option, layout.kind, grid.describe(), self.comm.size)
                yield Line(*place, *self._found(case, parts[key], part))

    def layouts(self, case: Case) -> Sequence[CaseLayout]:
        """Return the layouts in which ``case`` is computed on these ranks."""
        return case.layouts(self.comm.size)

    def backend(self, case: Case, layout: CaseLayout, grid: ProcessGrid) -> ReferenceBackend:
        """Return the backend of the ranks.

        Parameters
        ----------
        case : Case
        layout : CaseLayout
        grid : ProcessGrid

        Returns
        -------
        ReferenceBackend
        """
        return DistributedBackend(grid, layout, self.fails)

    def fails(self, failed: bool) -> bool:
        """Return True if something failed on any rank, given whether it did here. Collective."""
        return bool(self._private.allreduce(failed, MPI.LOR))

    def grid(self, extents: tuple[tuple[str, int], ...]) -> ProcessGrid:
        """Return the grid of the ranks with these axes; the same object each time."""
        key = tuple(sorted(extents))
        if key not in self._grids:
            self._grids[key] = ProcessGrid(self.comm, **dict(extents))
        return self._grids[key]

    def classify(self, reference: Refusal | None, outcomes: Sequence[RankOutcome], case: Case) -> tuple[Verdict, str]:
        """Return the verdict and its message.

        Parameters
        ----------
        reference : Refusal or None
            Error of torch, if it rejects the case.
        outcomes : sequence of RankOutcome
            Outcome of each rank.
        case : Case

        Returns
        -------
        (Verdict, str)
        """
        return classify(reference, outcomes, infinite=case.infinite)

    def _attempt(self, case: Case, backend: ReferenceBackend) -> _RankPart:
        refused = None
        call_site.clear_warned_sites()
        with warnings.catch_warnings(record=True) as told, count_traffic() as traffic:
            warnings.simplefilter("always")
            try:
                case.compute(backend)
                backend.together()
            except OthersRaise as error:
                refused = refusal(error)
            except Exception as error:
                self._watch.case += f" [rank {self.comm.rank}: {type(error).__name__}: {error}]"
                refused = refusal(error)
                backend.together(failed=True)  # Matches the call in which the other ranks wait, so that they raise.
        replicates = any(issubclass(warning.category, ReplicationWarning) for warning in told)
        return _RankPart(refused, backend.results, traffic, replicates)

    def _found(self, case: Case, reference: _RankPart, part: _RankPart) -> tuple[Verdict, str, int, int, int]:
        """Return the verdict, its message, and the bytes if the result is exact. Collective."""
        compared = (
            "" if part.refused or reference.refused else difference(reference.values, part.values, case.condition)
        )
        outcome, reduced = RankOutcome(part.refused, compared), sum(part.traffic.reduced.values())
        # Every rank classifies the outcomes of all ranks, so all of them have the same verdict.
        shares = self._private.allgather(_Share(outcome, part.traffic.sent, reduced, part.replicates))
        verdict, text = self.classify(reference.refused, [each.outcome for each in shares], case)
        sent: Counter[str] = sum((each.sent for each in shares), Counter())
        moved = sum(count for what, count in sent.items() if what.startswith("redistribution"))
        if verdict is Verdict.EXACT and any(each.replicates for each in shares):
            verdict = Verdict.REPLICATES
        elif verdict is Verdict.EXACT and moved:
            verdict = Verdict.REDISTRIBUTES
        if verdict not in EXACT:
            return verdict, text, 0, 0, 0
        return verdict, text, moved, sent.total() - moved, sum(each.reduced for each in shares)
