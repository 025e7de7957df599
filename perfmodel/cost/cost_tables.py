"""Cost of a strategy as tables, which the planner evaluates and the search minimizes.

There is one variable per deciding layer; its value is the index of a candidate. The model of a training step is a list
of terms, forward and then backward. In this module, a step without "training" is one entry of such a list. There are
two kinds of time::

    COMPUTE    the compute stream is busy for the term's time: T += term
    ALLREDUCE  queued when compute reaches it, one at a time, overlapped with what follows: E = max(E, T) + term

A training step takes max(T, E). Unrolled, this is the largest of several sums of terms: for each all-reduce k, all
computation before k is queued plus all all-reduces from k on. Memory is a largest of sums as well: resident terms, plus
what has been kept up to a point and not released, plus what is needed at that point alone.

The exact search of :mod:`distconv.perfmodel.strategy` works on these tables and is independent of layers and grids. It
relies on terms that are never negative.

Source: Dryden et al. 2019, V-B (greedy overlap, one all-reduce at a time), V-C.
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
    """Quantity to which a step adds: time (COMPUTE, ALLREDUCE) or memory.

    RESIDENT bytes stay for the full step, KEEP bytes until their RELEASE, TRANSIENT bytes during one operation.
    """

    COMPUTE = "compute"
    ALLREDUCE = "allreduce"
    RESIDENT = "resident"
    KEEP = "keep"
    RELEASE = "release"
    TRANSIENT = "transient"


def makespan(terms: Iterable[tuple[CostKind, Any]], largest: Callable[[Any, Any], Any]) -> Any:
    """Return the time of a training step, from its COMPUTE and ALLREDUCE steps.

    Source: Dryden et al. 2019, V-B.

    Parameters
    ----------
    terms : iterable of (CostKind, number or array)
        COMPUTE and ALLREDUCE steps in order, in seconds.
    largest : callable
        ``max`` or ``np.maximum``.

    Returns
    -------
    number or array
        Seconds.
    """
    clock = reduced = 0.0
    for kind, term in terms:
        if kind is CostKind.COMPUTE:
            clock = clock + term
        else:
            reduced = largest(reduced, clock) + term
    return largest(clock, reduced)


def peak(terms: Iterable[tuple[CostKind, Any]], largest: Callable[[Any, Any], Any]) -> Any:
    """Return the most memory at any point of the forward or backward pass.

    The backward pass goes through the same points in reverse, so the steps of the forward pass are enough. A KEEP
    counts at TRANSIENT steps only: at least one of them must lie between a KEEP and its RELEASE.

    Parameters
    ----------
    terms : iterable of (CostKind, number or array)
        Steps of memory in the order of the forward pass, in bytes.
    largest : callable
        ``max`` or ``np.maximum``.

    Returns
    -------
    number or array
        Bytes.
    """
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
    """Seconds or bytes of a step, as a function of no, one or two decisions.

    Attributes
    ----------
    kind : CostKind
    decisions : tuple of str
        Decisions on which the term depends: grids of layers, by their names, and over which axes layers shard their
        weights.
    cost : callable
        Function of the values of these decisions. A RELEASE has the identical ``cost`` as the KEEP that it ends: they
        are paired by identity.
    """

    kind: CostKind
    decisions: tuple[str, ...]
    cost: Callable[..., float]


@dataclass(frozen=True, eq=False)
class CostTerm:
    """A :class:`Term` as a table over the candidates of its layers.

    Attributes
    ----------
    kind : CostKind
    variables : tuple of int
        No, one or two variables.
    table : array
        Seconds or bytes by the values of the variables.
    """

    kind: CostKind
    variables: tuple[int, ...]
    table: Array

    def values(self, choices: Choices) -> Array:
        """Return the term for ``choices`` (..., variables of the problem); the result has shape (...)."""
        return self.table[tuple(choices[..., v] for v in self.variables)]


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """Time and memory of every choice of one candidate per variable.

    Attributes
    ----------
    sizes : tuple of int
        Number of candidates of each variable.
    time : tuple of CostTerm
        COMPUTE and ALLREDUCE steps, in order.
    memory : tuple of CostTerm
        RESIDENT, KEEP, RELEASE and TRANSIENT steps, in the order of the forward pass. A RELEASE has the identical table
        of the KEEP that it ends: they are paired by identity.
    """

    sizes: tuple[int, ...]
    time: tuple[CostTerm, ...]
    memory: tuple[CostTerm, ...]

    def times(self, choices: Choices) -> Array:
        """Return the seconds of a training step for ``choices`` (..., variables); the result has shape (...)."""
        return np.asarray(makespan(((step.kind, step.values(choices)) for step in self.time), np.maximum))

    def memories(self, choices: Choices) -> Array:
        """Return the bytes on the rank with the most memory; shapes as in :meth:`times`."""
        return np.asarray(peak(((step.kind, step.values(choices)) for step in self.memory), np.maximum))

    def time_sums(self) -> TableSums:
        """Return the sums whose largest is :meth:`times`."""
        return unroll_sums(self.sizes, self.time, time_rows([step.kind for step in self.time]))

    def memory_sums(self) -> TableSums:
        """Return the sums whose largest is :meth:`memories`."""
        return unroll_sums(self.sizes, self.memory, memory_rows(self.memory))

    @property
    def combinations(self) -> int:
        """Number of choices, exact."""
        return math.prod(self.sizes)


class TableSums:
    """Sums of tables. The largest of the first sums is minimized, and the others must be at most zero.

    Row ``r`` is ``offsets[r]`` plus all terms ``t`` with ``rows[r, t] = 1``. Tables are finite and not negative.

    Parameters
    ----------
    sizes : tuple of int
        Number of values of each variable.
    scopes : list of tuple of int
        No, one or two variables of each term. No two terms agree in both scope and rows.
    tables : list of array
        Value of each term by its variables.
    rows : array (rows, terms)
        Zeros and ones.
    offsets : array (rows)
        Constant of each sum.
    objective : int
        The first ``objective`` rows are minimized (their maximum). The others must be at most zero.
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
        # Variable and stride of each axis of each term; variable and stride 0 for missing axes.
        self._variables, self._strides = np.zeros((2, 2, len(tables)), np.int64)
        for term, (scope, table) in enumerate(zip(scopes, tables, strict=True)):
            for axis, variable in enumerate(scope):
                self._variables[axis, term] = variable
                self._strides[axis, term] = math.prod(table.shape[axis + 1 :])
        self._terms_of = [np.flatnonzero([v in scope for scope in scopes]) for v in range(len(sizes))]

    def values(self, choices: Choices) -> Array:
        """Return all sums for ``choices`` (..., variables); the result has shape (..., rows)."""
        result: Array = self._terms(choices, np.arange(len(self.tables))) @ self.rows.T + self.offsets
        return result

    def sum_changes(self, choices: Choices, variable: int) -> Array:
        """Return the change of all sums if ``variable`` takes each of its values and the other choices stay.

        Parameters
        ----------
        choices : array of int, shape (variables,)
            A value of each variable.
        variable : int
            The variable that changes.

        Returns
        -------
        array of float, shape (values, rows)
        """
        # Only terms with this variable change, which are few of all terms.
        tried = np.repeat(choices[None], self.sizes[variable], axis=0)
        tried[:, variable] = np.arange(self.sizes[variable])
        terms = self._terms_of[variable]
        values = self._terms(tried, terms)
        result: Array = (values - values[choices[variable]]) @ self.rows[:, terms].T
        return result

    def _terms(self, choices: Choices, terms: Choices) -> Array:
        # All tables lie in one array, so that many terms are looked up by one indexing operation. A missing axis has
        # stride 0, and adds nothing to the index.
        first, second = self._variables[:, terms]
        along, across = self._strides[:, terms]
        terms_of: Array = self._flat[self._starts[terms] + choices[..., first] * along + choices[..., second] * across]
        return terms_of

    def scale(self, factor: float) -> TableSums:
        """Return the sums multiplied by ``factor``."""
        tables = [np.asarray(table * factor) for table in self.tables]
        return TableSums(
            self.sizes, self.scopes, tables, rows=self.rows, offsets=self.offsets * factor, objective=self.objective
        )

    def restrict(self, kept: list[Choices]) -> TableSums:
        """Return the sums with only the values ``kept`` of each variable, renumbered."""
        tables = [
            np.ascontiguousarray(table[np.ix_(*(kept[v] for v in scope))]) if scope else table
            for scope, table in zip(self.scopes, self.tables, strict=True)
        ]
        sizes = tuple(len(values) for values in kept)
        return TableSums(sizes, self.scopes, tables, rows=self.rows, offsets=self.offsets, objective=self.objective)

    def constrain(self, other: TableSums, limit: float) -> TableSums:
        """Return these sums as the objective, with those of ``other`` constrained to at most ``limit``.

        Parameters
        ----------
        other : TableSums
            Sums over the same variables.
        limit : float
            Upper bound of each of them.

        Returns
        -------
        TableSums
        """
        # Block diagonal: each sum adds terms of its own kind, seconds or bytes.
        rows = np.zeros((len(self.rows) + len(other.rows), len(self.tables) + len(other.tables)))
        rows[: len(self.rows), : len(self.tables)] = self.rows
        rows[len(self.rows) :, len(self.tables) :] = other.rows
        offsets = np.concatenate([self.offsets, other.offsets - limit])
        return TableSums(
            self.sizes,
            self.scopes + other.scopes,
            self.tables + other.tables,
            rows=rows,
            offsets=offsets,
            objective=self.objective,
        )


def time_rows(kinds: Sequence[CostKind]) -> Array:
    """Return which steps each sum of time adds, as unrolled in the module's description.

    Parameters
    ----------
    kinds : sequence of CostKind
        COMPUTE and ALLREDUCE steps in order.

    Returns
    -------
    array (all-reduces + 1, steps)
        Zeros and ones. The last row adds all computation.
    """
    # All-reduce k starts when compute has reached it and earlier ones are done: max over k of T(k) + all from k on.
    computes = np.array([kind is CostKind.COMPUTE for kind in kinds], dtype=bool)
    when = np.arange(len(kinds))
    starts = when[~computes][:, None]
    rows = np.where(computes, when < starts, when >= starts)
    return np.concatenate([rows, computes[None]]).astype(np.float64)


def memory_rows(steps: Sequence[CostTerm]) -> Array:
    """Return which steps each sum of memory adds.

    Parameters
    ----------
    steps : sequence of CostTerm
        Steps of memory in order.

    Returns
    -------
    array (transients + 1, steps)
        Zeros and ones. Each row adds the resident steps, all that is kept at a transient, and the transient; the last
        row adds what stays until the end.
    """
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


def unroll_sums(sizes: tuple[int, ...], steps: Sequence[CostTerm], rows: Array) -> TableSums:
    """Return the sums of some steps, without zero terms and redundant rows, and with equal terms added up.

    Parameters
    ----------
    sizes : tuple of int
        Number of values of each variable.
    steps : sequence of CostTerm
    rows : array (rows, steps)
        Zeros and ones.

    Returns
    -------
    TableSums
    """
    # 1. Leave out terms that add nothing; a RELEASE acts by the rows of its KEEP. 2. Leave out rows that another one
    # covers. 3. Add up terms of the same variables in the same rows.
    alive = [index for index, step in enumerate(steps) if step.table.any() and step.kind is not CostKind.RELEASE]
    rows = drop_covered_rows(rows[:, alive])
    merged: dict[tuple[tuple[int, ...], bytes], Array] = {}
    columns: dict[tuple[tuple[int, ...], bytes], Array] = {}
    for column, index in enumerate(alive):
        scope, table = sort_variables(steps[index])
        key = scope, rows[:, column].tobytes()
        merged[key] = merged[key] + table if key in merged else table
        columns[key] = rows[:, column]
    scopes = [scope for scope, _ in merged]
    tables = [np.array(table, dtype=np.float64, order="C") for table in merged.values()]
    matrix = np.stack(list(columns.values()), axis=1) if columns else np.zeros((1, 0))
    return TableSums(sizes, scopes, tables, rows=matrix, offsets=np.zeros(len(matrix)), objective=len(matrix))


def drop_covered_rows(rows: Array) -> Array:
    """Return the rows without those whose terms are all in another row; of equal rows, the last stays."""
    # Terms are never negative, so a sum of some of another's terms is never the largest.
    # inside[a, b]: no term of row a is missing in row b.
    inside = (rows @ (1 - rows).T) == 0
    equal = inside & inside.T
    redundant = (inside & ~equal).any(axis=1) | np.triu(equal, 1).any(axis=1)
    kept: Array = rows[~redundant]
    return kept


def sort_variables(step: CostTerm) -> tuple[tuple[int, ...], Array]:
    """Return the variables of a term, each once and ascending, and its table in that order."""
    if len(step.variables) < 2:
        return step.variables, step.table
    first, second = step.variables
    if first == second:
        return (first,), np.diagonal(step.table)
    return ((first, second), step.table) if first < second else ((second, first), step.table.T)


def as_choice_array(choices: Sequence[int]) -> Choices:
    """Return the indices of one strategy as an array for :meth:`AssignmentProblem.times`."""
    return np.asarray(choices, dtype=np.int64)
