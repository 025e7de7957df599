"""Search over partial choices: one variable after the other, keeping those that may still lead to the best.

A label is a choice of the first variables of an order and what the sums have come to. Three things end a label: its
lower bound (an elimination's, exact for the additive sum) is above a threshold; another label with the same values of
the variables that still matter is nowhere worse; or there are too many and it is among those with the largest bounds.
The least bound of the last kind, or the best choice found, bounds all choices.

Sums to which the future adds the same terms are one: only the largest of them counts. For a chain of layers in the
order of backpropagation that leaves two, the clock of the computation and the end of the last allreduce.

Source: K. Kask and R. Dechter, A general scheme for automatic generation of search heuristics, 2001; DESIGN.md, 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distconv.perfmodel.cost.cost_tables import Array, Choices, Sums
from distconv.perfmodel.strategy.bucket_elimination import Elimination, Relaxation, neighbours

Indices = npt.NDArray[np.int64]

DECIMALS = 12
"""Sums (of the order of one) are compared after rounding to so many."""

TOLERANCE = 1e-13
"""A sum that may not pass zero is that much above it by rounding."""

KEY_LIMIT = 2**40
PIVOTS = 12
"""How many labels of a group every other one is compared with."""

CROWD = 4
"""How many times the width may be left before labels are compared with each other."""

HURRIED_WIDTH = 200
"""Labels kept once time has run out."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Sums with the same past or the same future as one column: the largest of its ``members`` among candidates.

    ``candidate_of`` and ``column_of`` say where each sum is; ``future`` is the most that is still added to a column.
    """

    members: tuple[Indices, ...]
    candidate_of: Indices
    column_of: Indices
    future: Array
    objective: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SearchLevel:
    """What deciding ``variable`` adds: ``tables`` (values of another variable or 1, values, increments) by variable.

    A candidate is an old column plus an increment: the indices ``old`` and ``increment``. ``open_variables`` share
    terms with undecided ones.
    """

    variable: int
    tables: tuple[tuple[int | None, Array], ...]
    old: Indices
    increment: Indices
    columns: Columns
    open_variables: tuple[int, ...]


@dataclass(eq=False)
class Labels:
    """Partial ``choices`` (labels, variables), their ``values`` (labels, columns), and ``bounds`` (labels)."""

    choices: npt.NDArray[np.int16]
    values: Array
    bounds: Array

    def __len__(self) -> int:
        return len(self.choices)

    def take(self, which: Indices) -> Labels:
        """Some of them."""
        return Labels(self.choices[which], self.values[which], self.bounds[which])


class LabelSearch:
    """Label search over the variables of ``elimination`` in its order.

    Labels end whose bound from ``weights`` (one per sum) is above ``threshold``. ``floor`` is a known bound of what is
    minimised. Sums should be of the order of one.
    """

    def __init__(self, elimination: Elimination, weights: Array, threshold: float, floor: float):
        self.sums, self.weights, self.threshold, self.floor = elimination.sums, weights, threshold, floor
        self.first, self.levels = levels(self.sums, elimination.order)
        relaxation = elimination.run(weights)
        self._bound = relaxation.bound
        self._excesses = by_variable(relaxation)

    def run(self, width: int, expired: Callable[[], bool]) -> tuple[Choices, float]:
        """Complete choices within the threshold, best first, and a bound of all others within it.

        The bound is infinite if ``width`` was enough. After ``expired()`` there is little width.
        """
        labels = self._root()
        bound = np.inf
        for level in self.levels:
            width = min(width, HURRIED_WIDTH) if expired() else width
            labels, cut = self._decided(labels, level, width)
            bound = min(bound, cut)
            labels = labels.take(undominated(group_keys(labels.choices, self.sums.sizes, level), labels.values))
            which, cut = lowest(np.arange(len(labels)), labels.bounds, width)
            labels, bound = labels.take(which), min(bound, cut)
        best = np.argsort(labels.values[:, self.levels[-1].columns.column_of[0]], kind="stable")
        return labels.choices[best].astype(np.int64), bound

    def _root(self) -> Labels:
        constants = [
            float(t) if not scope else 0.0 for t, scope in zip(self.sums.tables, self.sums.scopes, strict=True)
        ]
        start = (self.sums.offsets + self.sums.rows @ np.array(constants))[None]
        choices = np.zeros((1, len(self.sums.sizes)), np.int16)
        return self._merged(Labels(choices, start, np.array([self._bound])), self.first)

    def _decided(self, labels: Labels, level: SearchLevel, width: int) -> tuple[Labels, float]:
        """All labels with each value of the level's variable, and the least bound of those that were too many."""
        size = self.sums.sizes[level.variable]
        bounds = np.repeat(labels.bounds[:, None], size, axis=1)
        for scope, strides, excess in self._excesses[level.variable]:
            bounds += excess[labels.choices[:, scope] @ strides]
        # Bounds first: they cost a look into a table each, the sums of a label a row.
        which = np.flatnonzero(bounds <= self.threshold)
        which, cut = lowest(which, bounds.ravel()[which], CROWD * width)
        parents, values = which // size, which % size
        choices = labels.choices[parents]
        choices[:, level.variable] = values
        increments = np.zeros((len(which), 1 + int(level.increment.max())))
        for other, table in level.tables:
            increments += table[choices[:, other] if other is not None else 0, values]
        candidates = labels.values[parents][:, level.old] + increments[:, level.increment]
        merged = self._merged(Labels(choices, candidates, bounds.ravel()[which]), level.columns)
        allowed = (merged.values[:, ~level.columns.objective] <= TOLERANCE).all(axis=1)
        return merged.take(np.flatnonzero(allowed & (merged.bounds <= self.threshold))), cut

    def _merged(self, labels: Labels, columns: Columns) -> Labels:
        """Candidates' values become columns; what the largest gains on the weighted sum, the bound gains."""
        # A sum that cannot reach the floor any more, whatever comes, is as good as one that just does: more labels tie.
        floors = np.where(columns.objective, self.floor, 0.0) - columns.future
        values = np.stack([labels.values[:, members].max(axis=1) for members in columns.members], axis=1)
        values = np.maximum(values, floors)
        new = np.bincount(columns.column_of, self.weights, len(columns.members))
        old = np.bincount(columns.candidate_of, self.weights, labels.values.shape[1])
        return Labels(labels.choices, values, labels.bounds + values @ new - labels.values @ old)


def by_variable(relaxation: Relaxation) -> dict[int, list[tuple[Indices, Indices, Array]]]:
    """For each variable its buckets: scope, strides into, and table (choices of the scope, values) of their excess."""
    elimination = relaxation.elimination
    result: dict[int, list[tuple[Indices, Indices, Array]]] = {variable: [] for variable in elimination.order}
    sizes = elimination.sums.sizes
    for index, bucket in enumerate(elimination.buckets):
        scope = np.array(bucket.scope, dtype=np.int64)
        strides = [math.prod(sizes[v] for v in bucket.scope[axis + 1 :]) for axis in range(len(scope))]
        table = relaxation.excess(index).reshape(-1, sizes[bucket.variable])
        result[bucket.variable].append((scope, np.array(strides, dtype=np.int64), table))
    return result


def levels(sums: Sums, order: Sequence[int]) -> tuple[Columns, list[SearchLevel]]:
    """The columns before any decision, and a level for each variable."""
    position = {variable: index for index, variable in enumerate(order)}
    last = np.array([max((position[v] for v in scope), default=-1) for scope in sums.scopes], dtype=np.int64)
    most = np.array([table.max() for table in sums.tables])
    near = neighbours(sums)
    first = columns = columns_after(sums, last > -1, np.arange(len(sums.rows)), most)
    result = []
    for index, variable in enumerate(order):
        here = np.flatnonzero(last == index)
        patterns, pattern_of = np.unique(sums.rows[:, here], axis=0, return_inverse=True)
        pairs = np.stack([columns.column_of, pattern_of.ravel()], axis=1)
        candidates, candidate_of = np.unique(pairs, axis=0, return_inverse=True)
        columns = columns_after(sums, last > index, candidate_of.ravel(), most)
        decided = [v for v in order[: index + 1] if any(position[other] > index for other in near[v])]
        tables = increment_tables(sums, variable, here, patterns)
        result.append(SearchLevel(variable, tables, candidates[:, 0], candidates[:, 1], columns, tuple(decided)))
    return first, result


def columns_after(sums: Sums, future: npt.NDArray[np.bool_], candidate_of: Indices, most: Array) -> Columns:
    """Sums in columns when the terms ``future``, each ``most`` as large, are still to come.

    A sum counts only while it is above every other one to which at least the same terms will be added, so it may be
    taken for the largest of them.
    """
    coming = sums.rows * future
    objective = np.arange(len(sums.rows)) < sums.objective
    kinds, first, kind_of = alike(np.column_stack([objective, coming]))
    # Which kinds of sum will grow at least as much as which others.
    covered = ((kinds[:, 1:] @ (1 - kinds[:, 1:]).T) == 0) & (kinds[:, :1] == kinds[:, 0])
    holds = np.zeros((len(kinds), int(candidate_of.max()) + 1))
    holds[kind_of, candidate_of] = 1
    members, leaders, column_of_kind = alike(covered @ holds > 0)
    column_of = column_of_kind[kind_of]
    still = np.zeros(len(members))
    np.maximum.at(still, column_of, coming @ most)
    return Columns(tuple(map(np.flatnonzero, members)), candidate_of, column_of, still, objective[first[leaders]])


def alike(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Indices, Indices]:
    """The different ones of ``rows`` of zeros and ones, where each is first, and which of them each row is."""
    index: dict[bytes, int] = {}
    which = np.array([index.setdefault(row.tobytes(), len(index)) for row in np.packbits(rows > 0, axis=1)])
    first = np.unique(which, return_index=True)[1]
    return rows[first], first, which


def increment_tables(
    sums: Sums, variable: int, terms: Indices, patterns: Array
) -> tuple[tuple[int | None, Array], ...]:
    """What the ``terms`` add in each of ``patterns`` (increments, terms), by the other variable that they depend on."""
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
    """The same number for labels that agree in the level's open variables."""
    keys = np.zeros(len(choices), np.int64)
    reach = 1
    for variable in level.open_variables:
        if reach * sizes[variable] > KEY_LIMIT:
            # The next product might not fit into an int64: number the keys that there are.
            keys = np.unique(keys, return_inverse=True)[1].astype(np.int64)
            reach = len(choices)
        keys = keys * sizes[variable] + choices[:, variable]
        reach *= sizes[variable]
    return keys


def undominated(keys: Indices, values: Array) -> Indices:
    """Labels to which no other with the same key is nowhere worse (for more than two columns: none of some others)."""
    rounded = np.round(values, DECIMALS)
    if rounded.shape[1] > 2:
        return undominated_by_pivots(keys, rounded)
    first, second = rounded[:, 0], rounded[:, -1]
    order = np.lexsort((second, first, keys))
    group = np.concatenate([np.zeros(min(1, len(order)), np.int64), np.cumsum(np.diff(keys[order]) != 0)])
    # Ranks descend from group to group, so that the least so far is one of the same group.
    ranks = np.unique(second, return_inverse=True)[1][order] - group * len(order)
    least = np.minimum.accumulate(ranks)
    better = np.ones(len(order), bool)
    better[1:] = ranks[1:] < least[:-1]
    return order[better]


def undominated_by_pivots(keys: Indices, values: Array) -> Indices:
    """Labels to which none of the first ones of their group, by the sum of the columns, is nowhere worse."""
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


def lowest(which: Indices, bounds: Array, count: int) -> tuple[Indices, float]:
    """The ``count`` of ``which`` with the least ``bounds``, in order, and the least bound of the others."""
    if len(which) <= count:
        return which, np.inf
    order = np.argpartition(bounds, count)
    return which[np.sort(order[:count])], float(bounds[order[count]])
