"""Search over partial choices, one variable after the other, with bounds and dominance.

A label is a choice of the first variables of an order, with the values of the sums so far. A label ends for one of
three reasons. Its lower bound (from an elimination, exact for the additive sum) is above a threshold. Another label
with the same values of the still relevant variables is at least as good in every sum. Or there are too many labels, and
it has one of the largest bounds. The least bound of the third kind, or the best choice found, bounds all choices.

Sums to which the future adds the same terms share a column: only the largest of them counts. For a chain of layers in
the order of backpropagation two columns remain: the time of the computation and the end of the last all-reduce.

In this module a candidate is not a distribution. The decision of a variable adds an increment to each sum. A candidate
is an old column plus one increment; sums with the same past share a candidate. The new columns are maxima of
candidates.

Source: K. Kask and R. Dechter, A general scheme for automatic generation of search heuristics, 2001.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distconv.perfmodel.cost.cost_tables import Array, Choices, TableSums
from distconv.perfmodel.strategy.bucket_elimination import Elimination, Relaxation, neighbours

Indices = npt.NDArray[np.int64]

DECIMALS = 12
"""Decimals to which sums (of the order of one) are rounded before they are compared."""

TOLERANCE = 1e-13
"""Rounding error by which a sum may exceed zero."""

KEY_LIMIT = 2**40
"""Largest product of sizes up to which labels are numbered without renumbering."""

PIVOTS = 12
"""Number of labels of a group with which every other label is compared."""

CROWD = 4
"""Multiple of the width that may remain before labels are compared with each other."""

HURRIED_WIDTH = 200
"""Number of labels that are kept after the time limit."""


@dataclass(frozen=True, eq=False)
class SumColumns:
    """Sums that share a column because they have the same past or the same future.

    Attributes
    ----------
    members : tuple of array
        Candidates whose largest is the column.
    candidate_of, column_of : array (sums)
        Candidate and column of each sum.
    future : array (columns)
        The most that is still added to a column.
    objective : array (columns)
        True for columns that are minimized. Otherwise they must be at most zero.
    """

    members: tuple[Indices, ...]
    candidate_of: Indices
    column_of: Indices
    future: Array
    objective: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SearchLevel:
    """One level of the search: the decision of a variable.

    Attributes
    ----------
    variable : int
    tables : tuple of (int or None, array)
        Increments by another variable (None: independent of any), shape (its values or 1, values, increments).
    old, increment : array (candidates)
        A candidate is an old column plus an increment; these are their indices.
    columns : SumColumns
        Columns after the decision.
    open_variables : tuple of int
        Decided variables that share terms with undecided ones.
    """

    variable: int
    tables: tuple[tuple[int | None, Array], ...]
    old: Indices
    increment: Indices
    columns: SumColumns
    open_variables: tuple[int, ...]


@dataclass(eq=False)
class Labels:
    """Partial choices with their values and bounds.

    Attributes
    ----------
    choices : array (labels, variables)
    values : array (labels, columns)
    bounds : array (labels)
    """

    choices: npt.NDArray[np.int16]
    values: Array
    bounds: Array

    def __len__(self) -> int:
        return len(self.choices)

    def take(self, which: Indices) -> Labels:
        """Return some of the labels."""
        return Labels(self.choices[which], self.values[which], self.bounds[which])


class LabelSearch:
    """Label search over the variables of an elimination, in its order.

    Parameters
    ----------
    elimination : Elimination
        With sums of the order of one.
    weights : array
        One per sum, for the bounds.
    threshold : float
        Labels with a larger bound end.
    floor : float
        Known lower bound of the objective.
    """

    def __init__(self, elimination: Elimination, weights: Array, threshold: float, floor: float):
        self.sums, self.weights, self.threshold, self.floor = elimination.sums, weights, threshold, floor
        self.first, self.levels = search_levels(self.sums, elimination.order)
        relaxation = elimination.run(weights)
        self._bound = relaxation.bound
        self._excesses = excess_by_variable(relaxation)

    def run(self, width: int, expired: Callable[[], bool]) -> tuple[Choices, float]:
        """Search with at most ``width`` labels per level.

        Parameters
        ----------
        width : int
            Number of labels to keep.
        expired : callable
            Returns True after the time limit. The search then continues with few labels.

        Returns
        -------
        choices : array (choices, variables)
            Complete choices within the threshold, best first.
        bound : float
            Lower bound of all others within the threshold; infinite if no label was dropped.
        """
        labels = self._root_label()
        bound = np.inf
        for level in self.levels:
            # 1. Decide the variable. 2. Drop dominated labels. 3. Keep the best ones. After the time limit the search
            # still reaches complete choices, which may be better than the best known one.
            width = min(width, HURRIED_WIDTH) if expired() else width
            labels, cut = self._extend_labels(labels, level, width)
            bound = min(bound, cut)
            # Labels that agree in the open variables have the same continuations, so the smaller one suffices.
            labels = labels.take(undominated(group_keys(labels.choices, self.sums.sizes, level), labels.values))
            which, cut = keep_lowest(np.arange(len(labels)), labels.bounds, width)
            # What is cut off has at least this bound, which limits the proof.
            labels, bound = labels.take(which), min(bound, cut)
        # After the last decision nothing is added any more, so all minimized sums share the column of the first one.
        best = np.argsort(labels.values[:, self.levels[-1].columns.column_of[0]], kind="stable")
        return labels.choices[best].astype(np.int64), bound

    def _root_label(self) -> Labels:
        constants = [
            float(t) if not scope else 0.0 for t, scope in zip(self.sums.tables, self.sums.scopes, strict=True)
        ]
        start = (self.sums.offsets + self.sums.rows @ np.array(constants))[None]
        # 16 bits are enough for a candidate's index, and the choices are most of a label's memory.
        choices = np.zeros((1, len(self.sums.sizes)), np.int16)
        return self._merge_columns(Labels(choices, start, np.array([self._bound])), self.first)

    def _extend_labels(self, labels: Labels, level: SearchLevel, width: int) -> tuple[Labels, float]:
        """Return all labels with each value of the level's variable, and the least bound of the dropped ones."""
        size = self.sums.sizes[level.variable]
        bounds = np.repeat(labels.bounds[:, None], size, axis=1)
        for scope, strides, excess in self._excesses[level.variable]:
            # The bound of a label is exact for the relaxation: its value plus the excess of each decision over the
            # best one.
            bounds += excess[labels.choices[:, scope] @ strides]
        # Bounds first: each takes one table lookup, while the sums of a label take a row.
        which = np.flatnonzero(bounds <= self.threshold)
        which, cut = keep_lowest(which, bounds.ravel()[which], CROWD * width)
        parents, values = which // size, which % size
        choices = labels.choices[parents]
        choices[:, level.variable] = values
        increments = np.zeros((len(which), 1 + int(level.increment.max())))
        for other, table in level.tables:
            increments += table[choices[:, other] if other is not None else 0, values]
        candidates = labels.values[parents][:, level.old] + increments[:, level.increment]
        merged = self._merge_columns(Labels(choices, candidates, bounds.ravel()[which]), level.columns)
        allowed = (merged.values[:, ~level.columns.objective] <= TOLERANCE).all(axis=1)
        return merged.take(np.flatnonzero(allowed & (merged.bounds <= self.threshold))), cut

    def _merge_columns(self, labels: Labels, columns: SumColumns) -> Labels:
        """Return the labels with candidates merged into columns, and the bounds raised by what the maxima add."""
        # A sum that cannot reach the floor any more counts like one that just reaches it, so that more labels tie.
        floors = np.where(columns.objective, self.floor, 0.0) - columns.future
        values = np.stack([labels.values[:, members].max(axis=1) for members in columns.members], axis=1)
        # Rounding up cannot change the result, since the objective never falls below the proven floor.
        values = np.maximum(values, floors)
        new = np.bincount(columns.column_of, self.weights, len(columns.members))
        old = np.bincount(columns.candidate_of, self.weights, labels.values.shape[1])
        return Labels(labels.choices, values, labels.bounds + values @ new - labels.values @ old)


def excess_by_variable(relaxation: Relaxation) -> dict[int, list[tuple[Indices, Indices, Array]]]:
    """Return for each variable the scope, strides and excess of its buckets.

    The excess has shape (choices of the scope, values), and the strides turn choices of the scope into its first index.
    """
    elimination = relaxation.elimination
    result: dict[int, list[tuple[Indices, Indices, Array]]] = {variable: [] for variable in elimination.order}
    sizes = elimination.sums.sizes
    for index, bucket in enumerate(elimination.buckets):
        scope = np.array(bucket.scope, dtype=np.int64)
        strides = [math.prod(sizes[v] for v in bucket.scope[axis + 1 :]) for axis in range(len(scope))]
        table = relaxation.excess(index).reshape(-1, sizes[bucket.variable])
        result[bucket.variable].append((scope, np.array(strides, dtype=np.int64), table))
    return result


def search_levels(sums: TableSums, order: Sequence[int]) -> tuple[SumColumns, list[SearchLevel]]:
    """Return the columns before any decision, and a level for each variable.

    Parameters
    ----------
    sums : TableSums
    order : sequence of int
        All variables.

    Returns
    -------
    tuple of SumColumns and list of SearchLevel
    """
    position = {variable: index for index, variable in enumerate(order)}
    # A term is added when its last variable is decided.
    last = np.array([max((position[v] for v in scope), default=-1) for scope in sums.scopes], dtype=np.int64)
    most = np.array([table.max() for table in sums.tables])
    near = neighbours(sums)
    first = columns = columns_after(sums, last > -1, np.arange(len(sums.rows)), most)
    result = []
    for index, variable in enumerate(order):
        # Terms whose last variable is decided here. Sums to which the same of these terms belong share an increment.
        here = np.flatnonzero(last == index)
        patterns, pattern_of = np.unique(sums.rows[:, here], axis=0, return_inverse=True)
        pairs = np.stack([columns.column_of, pattern_of.ravel()], axis=1)
        candidates, candidate_of = np.unique(pairs, axis=0, return_inverse=True)
        columns = columns_after(sums, last > index, candidate_of.ravel(), most)
        # Only variables with undecided neighbours influence what follows.
        decided = [v for v in order[: index + 1] if any(position[other] > index for other in near[v])]
        tables = increment_tables(sums, variable, here, patterns)
        result.append(SearchLevel(variable, tables, candidates[:, 0], candidates[:, 1], columns, tuple(decided)))
    return first, result


def columns_after(sums: TableSums, future: npt.NDArray[np.bool_], candidate_of: Indices, most: Array) -> SumColumns:
    """Return the columns of the sums while some terms are still undecided.

    A sum matters only while it exceeds every other sum to which at least the same terms will be added, so it may be
    replaced by the largest of them.

    Parameters
    ----------
    sums : TableSums
    future : array (terms)
        True for undecided terms. Otherwise they are decided.
    candidate_of : array (sums)
        Candidate of each sum.
    most : array (terms)
        Largest value of each term.

    Returns
    -------
    SumColumns
    """
    coming = sums.rows * future
    objective = np.arange(len(sums.rows)) < sums.objective
    kinds, first, kind_of = distinct_rows(np.column_stack([objective, coming]))
    # covered[a, b]: all future terms of kind a are also added to kind b.
    covered = ((kinds[:, 1:] @ (1 - kinds[:, 1:]).T) == 0) & (kinds[:, :1] == kinds[:, 0])
    holds = np.zeros((len(kinds), int(candidate_of.max()) + 1))
    holds[kind_of, candidate_of] = 1
    members, leaders, column_of_kind = distinct_rows(covered @ holds > 0)
    column_of = column_of_kind[kind_of]
    still = np.zeros(len(members))
    np.maximum.at(still, column_of, coming @ most)
    return SumColumns(tuple(map(np.flatnonzero, members)), candidate_of, column_of, still, objective[first[leaders]])


def distinct_rows(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Indices, Indices]:
    """Return the distinct rows of an array of zeros and ones.

    Also returned are the first index of each distinct row, and the distinct row of each row.
    """
    index: dict[bytes, int] = {}
    which = np.array([index.setdefault(row.tobytes(), len(index)) for row in np.packbits(rows > 0, axis=1)])
    first = np.unique(which, return_index=True)[1]
    return rows[first], first, which


def increment_tables(
    sums: TableSums, variable: int, terms: Indices, patterns: Array
) -> tuple[tuple[int | None, Array], ...]:
    """Return what some terms add, grouped by the other variable on which they depend.

    Parameters
    ----------
    sums : TableSums
    variable : int
        Variable that is decided.
    terms : array
        Terms that are complete after the decision.
    patterns : array (increments, terms)
        Terms of each increment.

    Returns
    -------
    tuple of (int or None, array)
        As ``SearchLevel.tables``.
    """
    result: dict[int | None, Array] = {}
    for term, pattern in zip(terms, patterns.T, strict=True):
        scope = sums.scopes[term]
        other = next((v for v in scope if v != variable), None)
        table = sums.tables[term][None] if other is None else sums.tables[term]
        table = table.T if other is not None and scope[0] == variable else table
        added = table[..., None] * pattern
        result[other] = result[other] + added if other in result else added
    return tuple(result.items())


def group_keys(choices: npt.NDArray[np.int16], sizes: Sequence[int], level: SearchLevel) -> Indices:
    """Return equal numbers for labels that agree in the level's open variables.

    Parameters
    ----------
    choices : array (labels, variables)
    sizes : sequence of int
        Number of values of each variable.
    level : SearchLevel

    Returns
    -------
    array (labels)
    """
    keys = np.zeros(len(choices), np.int64)
    reach = 1
    for variable in level.open_variables:
        if reach * sizes[variable] > KEY_LIMIT:
            # The next product might overflow an int64, so renumber the present keys.
            keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
            reach = len(choices)
        keys = keys * sizes[variable] + choices[:, variable]
        reach *= sizes[variable]
    return keys


def undominated(keys: Indices, values: Array) -> Indices:
    """Return the labels that no other label with the same key dominates.

    With more than two columns they are compared with some others only.

    Parameters
    ----------
    keys : array (labels)
    values : array (labels, columns)

    Returns
    -------
    array
        Indices of labels.
    """
    # Sums in another order differ in their last bits; without rounding equal labels would both stay.
    rounded = np.round(values, DECIMALS)
    if rounded.shape[1] > 2:
        return undominated_by_pivots(keys, rounded)
    first, second = rounded[:, 0], rounded[:, -1]
    # Sorted by the first column within each group: a label is dominated if an earlier one has no larger second column.
    order = np.lexsort((second, first, keys))
    group = np.concatenate([np.zeros(min(1, len(order)), np.int64), np.cumsum(np.diff(keys[order]) != 0)])
    # Ranks decrease from group to group, so the running minimum belongs to the same group.
    ranks = np.unique(second, return_inverse=True)[1][order] - group * len(order)
    least = np.minimum.accumulate(ranks)
    better = np.ones(len(order), bool)
    better[1:] = ranks[1:] < least[:-1]
    return order[better]


def undominated_by_pivots(keys: Indices, values: Array) -> Indices:
    """Return the labels that none of the first labels of their group, by the sum of the columns, dominates.

    Parameters
    ----------
    keys, values
        As in :func:`undominated`.

    Returns
    -------
    array
        Indices of labels.
    """
    # Labels with small sums first: they dominate most others.
    order = np.lexsort((values.sum(axis=1), keys))
    for pivot in range(PIVOTS):
        group = keys[order]
        starts = np.searchsorted(group, group) + pivot
        index = np.arange(len(order))
        compared = index > starts
        if not compared.any():
            break
        others = order[np.minimum(starts, index)]
        order = order[~(compared & (values[order] >= values[others]).all(axis=1))]
    return order


def keep_lowest(which: Indices, bounds: Array, count: int) -> tuple[Indices, float]:
    """Return the ``count`` labels with the least bounds, and the least bound of the others.

    Parameters
    ----------
    which : array
        Indices of labels.
    bounds : array
        Their bounds.
    count : int

    Returns
    -------
    tuple of array and float
        The bound is infinite if none was dropped.
    """
    if len(which) <= count:
        return which, np.inf
    # Sorted again, so that labels keep their order, which breaks ties of equal choices.
    # The bound of the first label that is dropped limits the proof.
    order = np.argpartition(bounds, count)
    return which[np.sort(order[:count])], float(bounds[order[count]])
