"""A strategy's cost as tables: what the planner evaluates and what the search minimises.

One variable per deciding layer, its value the index of a candidate. Time passes in steps, forward and then backward:

    COMPUTE    the compute stream is busy for the term's time: T += term
    ALLREDUCE  queued where compute has got to, one at a time, hidden behind what follows: E = max(E, T) + term

and a step takes max(T, E). Unrolled, that is the largest of sums of terms: for each allreduce k, all that computes
before it is queued plus all allreduces from it on. Memory is a largest of sums too: resident terms, plus what has been
kept up to a point (and not released), plus what is needed at that point alone.

Source: Dryden et al. 2019, V-B (greedy overlap, one allreduce at a time), V-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int64]


class CostKind(Enum):
    """What a step adds to."""

    COMPUTE = "compute"
    ALLREDUCE = "allreduce"
    RESIDENT = "resident"
    KEEP = "keep"
    RELEASE = "release"
    TRANSIENT = "transient"


def makespan(terms: Iterable[tuple[CostKind, Any]], largest: Callable[[Any, Any], Any]) -> Any:
    """Time that steps take; terms are numbers or arrays of them, ``largest`` is ``max`` or ``np.maximum``."""
    clock = reduced = 0.0
    for kind, term in terms:
        if kind is CostKind.COMPUTE:
            clock = clock + term
        else:
            reduced = largest(reduced, clock) + term
    return largest(clock, reduced)


def peak(terms: Iterable[tuple[CostKind, Any]], largest: Callable[[Any, Any], Any]) -> Any:
    """Most memory at any point of the forward or the backward pass; terms as in :func:`makespan`."""
    resident = kept = most = 0.0
    for kind, term in terms:
        if kind is CostKind.RESIDENT:
            resident = resident + term
        elif kind is CostKind.KEEP:
            kept = kept + term
        elif kind is CostKind.RELEASE:
            kept = kept - term
        else:
            most = largest(most, kept + term)
    return resident + largest(most, kept)


@dataclass(frozen=True, eq=False)
class Term:
    """Seconds or bytes that depend on the distribution of no layer, one or two: ``of`` takes as many.

    A RELEASE has the very ``of`` of the KEEP that it ends.
    """

    kind: CostKind
    layers: tuple[str, ...]
    of: Callable[..., float]


@dataclass(frozen=True, eq=False)
class CostTerm:
    """A term of time (seconds) or memory (bytes): ``table[choices of variables]``, of none, one or two variables."""

    kind: CostKind
    variables: tuple[int, ...]
    table: Array

    def of(self, choices: Choices) -> Array:
        """The term for ``choices`` of shape (..., number of variables of the problem); shape (...)."""
        return self.table[tuple(choices[..., v] for v in self.variables)]


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """Time and memory of every choice of one candidate per variable.

    ``sizes`` are the numbers of candidates; ``time`` holds COMPUTE and ALLREDUCE steps in the order in which they
    happen; ``memory`` holds RESIDENT, KEEP, RELEASE and TRANSIENT steps in the order of the forward pass; a
    RELEASE has the very table of the KEEP that it ends.
    """

    sizes: tuple[int, ...]
    time: tuple[CostTerm, ...]
    memory: tuple[CostTerm, ...]

    def times(self, choices: Choices) -> Array:
        """Seconds per training step; ``choices`` has shape (..., variables), the result (...)."""
        return np.asarray(makespan(((step.kind, step.of(choices)) for step in self.time), np.maximum))

    def memories(self, choices: Choices) -> Array:
        """Bytes on the fullest rank; shapes as in :meth:`times`."""
        return np.asarray(peak(((step.kind, step.of(choices)) for step in self.memory), np.maximum))

    def time_sums(self) -> Sums:
        """The sums whose largest is :meth:`times`."""
        return unrolled(self.sizes, self.time, time_rows([step.kind for step in self.time]))

    def memory_sums(self) -> Sums:
        """The sums whose largest is :meth:`memories`."""
        return unrolled(self.sizes, self.memory, memory_rows(self.memory))

    @property
    def combinations(self) -> int:
        """Number of choices, exact."""
        return math.prod(self.sizes)


class Sums:
    """The largest of sums of terms: row ``r`` adds ``offsets[r]`` and the terms ``t`` with ``rows[r, t]`` = 1.

    The first ``objective`` rows are to be minimised (their maximum), the others have to be at most zero. Term ``t`` is
    ``tables[t]`` of the variables ``scopes[t]`` (none, one or two; no two terms are alike in both scope and rows).
    Tables are finite and never negative.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        scopes: list[tuple[int, ...]],
        tables: list[Array],
        *,
        rows: Array,
        offsets: Array,
        objective: int,
    ):
        assert all(np.isfinite(table).all() and table.min() >= 0 for table in tables), "a cost below zero or infinite"
        self.sizes, self.scopes, self.tables = sizes, scopes, tables
        self.rows, self.offsets, self.objective = rows, offsets, objective
        ends = np.cumsum([0, *(table.size for table in tables)], dtype=np.int64)
        self._flat = np.concatenate([np.zeros(0), *(table.ravel() for table in tables)])
        self._starts = ends[:-1]
        # Variable and stride of each axis of each term; variable and stride 0 for axes it has not.
        self._variables, self._strides = np.zeros((2, 2, len(tables)), np.int64)
        for term, (scope, table) in enumerate(zip(scopes, tables, strict=True)):
            for axis, variable in enumerate(scope):
                self._variables[axis, term] = variable
                self._strides[axis, term] = math.prod(table.shape[axis + 1 :])
        self._terms_of = [np.flatnonzero([v in scope for scope in scopes]) for v in range(len(sizes))]

    def values(self, choices: Choices) -> Array:
        """All sums; ``choices`` has shape (..., variables), the result (..., rows)."""
        result: Array = self._terms(choices, np.arange(len(self.tables))) @ self.rows.T + self.offsets
        return result

    def changes(self, choices: Choices, variable: int) -> Array:
        """What every value of ``variable`` adds to the sums of ``choices`` (variables); shape (values, rows)."""
        tried = np.repeat(choices[None], self.sizes[variable], axis=0)
        tried[:, variable] = np.arange(self.sizes[variable])
        terms = self._terms_of[variable]
        values = self._terms(tried, terms)
        result: Array = (values - values[choices[variable]]) @ self.rows[:, terms].T
        return result

    def _terms(self, choices: Choices, terms: Choices) -> Array:
        first, second = self._variables[:, terms]
        along, across = self._strides[:, terms]
        terms_of: Array = self._flat[self._starts[terms] + choices[..., first] * along + choices[..., second] * across]
        return terms_of

    def scaled(self, factor: float) -> Sums:
        """All sums times ``factor``."""
        tables = [np.asarray(table * factor) for table in self.tables]
        return Sums(
            self.sizes, self.scopes, tables, rows=self.rows, offsets=self.offsets * factor, objective=self.objective
        )

    def restricted(self, kept: list[Choices]) -> Sums:
        """The same with only the values ``kept`` of each variable, renumbered."""
        tables = [
            np.ascontiguousarray(table[np.ix_(*(kept[v] for v in scope))]) if scope else table
            for scope, table in zip(self.scopes, self.tables, strict=True)
        ]
        sizes = tuple(len(values) for values in kept)
        return Sums(sizes, self.scopes, tables, rows=self.rows, offsets=self.offsets, objective=self.objective)

    def subject_to(self, other: Sums, limit: float) -> Sums:
        """These sums to be minimised while those of ``other`` are at most ``limit``."""
        rows = np.zeros((len(self.rows) + len(other.rows), len(self.tables) + len(other.tables)))
        rows[: len(self.rows), : len(self.tables)] = self.rows
        rows[len(self.rows) :, len(self.tables) :] = other.rows
        offsets = np.concatenate([self.offsets, other.offsets - limit])
        return Sums(
            self.sizes,
            self.scopes + other.scopes,
            self.tables + other.tables,
            rows=rows,
            offsets=offsets,
            objective=self.objective,
        )


def time_rows(kinds: Sequence[CostKind]) -> Array:
    """Which steps each sum of time adds: computing before an allreduce and all allreduces from it on, or computing."""
    # Allreduce k starts when compute has got to it and its forerunners are done: max over k of T(k) + all from k on.
    computes = np.array([kind is CostKind.COMPUTE for kind in kinds], dtype=bool)
    when = np.arange(len(kinds))
    starts = when[~computes][:, None]
    rows = np.where(computes, when < starts, when >= starts)
    return np.concatenate([rows, computes[None]]).astype(np.float64)


def memory_rows(steps: Sequence[CostTerm]) -> Array:
    """Which steps each sum of memory adds: residents, all kept at a transient, and it; or residents and what stays."""
    residents, keeps, transients = (
        np.array([step.kind is which for step in steps], dtype=bool)
        for which in (CostKind.RESIDENT, CostKind.KEEP, CostKind.TRANSIENT)
    )
    when = np.arange(len(steps))
    ends = np.full(len(steps), len(steps))
    # By identity: two layers of one shape have equal tables, but each RELEASE ends its own KEEP.
    kept = {id(step.table): index for index, step in enumerate(steps) if step.kind is CostKind.KEEP}
    for index, step in enumerate(steps):
        if step.kind is CostKind.RELEASE:
            ends[kept[id(step.table)]] = index
    peaks = when[transients][:, None]
    rows = residents | (keeps & (when < peaks) & (peaks < ends)) | (when == peaks)
    return np.concatenate([rows, (residents | (keeps & (ends == len(steps))))[None]]).astype(np.float64)


def unrolled(sizes: tuple[int, ...], steps: Sequence[CostTerm], rows: Array) -> Sums:
    """Sums of ``steps``: without zero terms, without rows that others contain, and with equal terms added up."""
    alive = [index for index, step in enumerate(steps) if step.table.any() and step.kind is not CostKind.RELEASE]
    rows = largest(rows[:, alive])
    merged: dict[tuple[tuple[int, ...], bytes], Array] = {}
    columns: dict[tuple[tuple[int, ...], bytes], Array] = {}
    for column, index in enumerate(alive):
        scope, table = in_order(steps[index])
        key = scope, rows[:, column].tobytes()
        merged[key] = merged[key] + table if key in merged else table
        columns[key] = rows[:, column]
    scopes = [scope for scope, _ in merged]
    tables = [np.array(table, dtype=np.float64, order="C") for table in merged.values()]
    matrix = np.stack(list(columns.values()), axis=1) if columns else np.zeros((1, 0))
    return Sums(sizes, scopes, tables, rows=matrix, offsets=np.zeros(len(matrix)), objective=len(matrix))


def largest(rows: Array) -> Array:
    """``rows`` without those whose terms are all in another one; of equal ones the last stays."""
    # Terms are never negative, so a sum of some of another's terms is never the largest.
    inside = (rows @ (1 - rows).T) == 0
    equal = inside & inside.T
    redundant = (inside & ~equal).any(axis=1) | np.triu(equal, 1).any(axis=1)
    kept: Array = rows[~redundant]
    return kept


def in_order(step: CostTerm) -> tuple[tuple[int, ...], Array]:
    """Variables of a term, each once and ascending, and its table in that order."""
    if len(step.variables) < 2:
        return step.variables, step.table
    first, second = step.variables
    if first == second:
        return (first,), np.diagonal(step.table)
    return ((first, second), step.table) if first < second else ((second, first), step.table.T)


def one(choices: Sequence[int]) -> Choices:
    """Indices of one strategy as an array that :meth:`AssignmentProblem.times` takes."""
    return np.asarray(choices, dtype=np.int64)
