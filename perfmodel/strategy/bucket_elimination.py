"""Smallest weighted sum of tables over all choices, by variable elimination.

Variables are eliminated one after the other. All tables of a variable are added up over the variables that they share
(a bucket). The minimum over the variable's values is a table of the remaining variables. In the reverse order, the
tables give the best choice, and a lower bound for each value of each variable. A bucket that would be too large is
split: each part chooses its own value of the variable, so the sum is a lower bound. A function is a sum of weighted
tables with the same variables. A message is the minimum that one bucket passes on to a later one.

Source: R. Dechter, Bucket elimination, 1999; R. Dechter and I. Rish, Mini-buckets, 2003.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distconv.perfmodel.cost.cost_tables import Array, Choices, TableSums

BUCKET_ENTRIES = 3_000_000
"""Most entries of a bucket. Larger buckets are split, which weakens the bound."""

ALL_ENTRIES = 30_000_000
"""Most entries of all buckets together. The limit for one bucket is lowered until they fit."""

STARTS = 12
"""Number of variables from which an order is tried."""

Neighbours = list[set[int]]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class BucketTable:
    """Table in a bucket.

    Attributes
    ----------
    message : bool
        True for the message of bucket ``index``. Otherwise the table is function ``index``.
    index : int
    scope : tuple of int
        Variables of the table.
    shape : tuple of int
        Shape over the variables of the bucket, the eliminated one first; 1 for variables that the table does not have.
    """

    message: bool
    index: int
    scope: tuple[int, ...]
    shape: Shape = ()


@dataclass(frozen=True)
class Bucket:
    """Tables that are added up before a variable is eliminated.

    Attributes
    ----------
    variable : int
        Variable to eliminate.
    scope : tuple of int
        Variables of the minimum.
    parts : tuple of BucketTable
        Tables to add.
    shape : tuple of int
        Shape of the sum.
    parent : int or None
        Bucket that contains the minimum as a part.
    """

    variable: int
    scope: tuple[int, ...]
    parts: tuple[BucketTable, ...]
    shape: Shape
    parent: int | None = None


class Elimination:
    """Elimination of all variables in the reverse of an order, for any weights of the rows.

    Parameters
    ----------
    sums : TableSums
    order : tuple of int
        All variables.
    entries : int, optional
        Most entries of a bucket. By default the entries of all buckets together are bounded as well.
    """

    def __init__(self, sums: TableSums, order: tuple[int, ...], entries: int | None = None):
        self.sums, self.order = sums, order
        self._position = {variable: index for index, variable in enumerate(order)}
        self._functions = self._stack_tables()
        self.buckets = self._fill_buckets(entries or BUCKET_ENTRIES)
        # Smaller buckets need less memory, but have a weaker bound.
        if entries is None:
            limit = BUCKET_ENTRIES
            while sum(math.prod(bucket.shape) for bucket in self.buckets) > ALL_ENTRIES and limit > 1000:
                limit //= 4
                self.buckets = self._fill_buckets(limit)

    def run(self, weights: Array) -> Relaxation:
        """Return the smallest weighted sum for ``weights`` (one per row, none negative)."""
        # 1. The weight of each term: sums are weighted, and each adds some of the terms. 2. Weighted tables by scope.
        shares = weights @ self.sums.rows
        functions = [shares[terms] @ tables for _, terms, tables in self._functions]
        bound = float(weights @ self.sums.offsets)
        bound += sum(
            shares[term] * float(table) for term, table in enumerate(self.sums.tables) if not self.sums.scopes[term]
        )
        # 3. Eliminate one variable after the other. Parts come from functions and from buckets before this one.
        tables: list[Array] = []
        lows: list[Array] = []
        for bucket in self.buckets:
            table = np.zeros(bucket.shape)
            for part in bucket.parts:
                # The variable of this bucket is the last one of a message's scope, and the first axis of the bucket.
                added = np.moveaxis(lows[part.index], -1, 0) if part.message else functions[part.index]
                table += added.reshape(part.shape)
            tables.append(table)
            lows.append(table.min(axis=0))
            if not bucket.scope:
                bound += float(lows[-1])
        return Relaxation(self, bound, tables, lows)

    def _sort_variables(self, variables: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(variables, key=self._position.__getitem__))

    def _stack_tables(self) -> list[tuple[tuple[int, ...], list[int], Array]]:
        """Return for each scope its terms and their tables (terms, entries), the last variable as first axis."""
        terms_of: dict[tuple[int, ...], list[int]] = {}
        for term, scope in enumerate(self.sums.scopes):
            if scope:
                terms_of.setdefault(scope, []).append(term)
        stacked = []
        for scope, terms in terms_of.items():
            ordered = self._sort_variables(scope)
            axes = [scope.index(variable) for variable in (ordered[-1], *ordered[:-1])]
            tables = [self.sums.tables[term].transpose(axes).ravel() for term in terms]
            stacked.append((ordered, terms, np.stack(tables)))
        return stacked

    def _fill_buckets(self, entries: int) -> list[Bucket]:
        """Return the buckets in the order of elimination."""
        waiting: dict[int, list[BucketTable]] = {variable: [] for variable in self.order}
        # A table waits in the bucket of its last variable, which is eliminated first.
        for index, (scope, _, _) in enumerate(self._functions):
            waiting[scope[-1]].append(BucketTable(False, index, scope))
        buckets: list[Bucket] = []
        for variable in reversed(self.order):
            for parts in self._split(waiting[variable], entries):
                index = len(buckets)
                for part in parts:
                    if part.message:
                        buckets[part.index] = replace(buckets[part.index], parent=index)
                buckets.append(self._bucket(variable, parts))
                if scope := buckets[-1].scope:
                    waiting[scope[-1]].append(BucketTable(True, index, scope))
        return buckets

    def _split(self, parts: list[BucketTable], entries: int) -> list[list[BucketTable]]:
        """Return the tables of one variable in few groups of at most ``entries`` each, the largest tables first."""
        # First fit, decreasing: few groups, because each group beyond the first weakens the bound.
        groups: list[tuple[set[int], list[BucketTable]]] = []
        for part in sorted(parts, key=lambda part: -self._size(part.scope)):
            for variables, group in groups:
                if self._size(variables.union(part.scope)) <= entries:
                    variables.update(part.scope)
                    group.append(part)
                    break
            else:
                groups.append((set(part.scope), [part]))
        return [group for _, group in groups] or [[]]

    def _size(self, variables: Iterable[int]) -> int:
        return math.prod(self.sums.sizes[variable] for variable in variables)

    def _bucket(self, variable: int, parts: list[BucketTable]) -> Bucket:
        scope = self._sort_variables({v for part in parts for v in part.scope} - {variable})
        sizes = self.sums.sizes
        axes = (variable, *scope)
        shaped = (replace(part, shape=tuple(sizes[v] if v in part.scope else 1 for v in axes)) for part in parts)
        return Bucket(variable, scope, tuple(shaped), tuple(sizes[v] for v in axes))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Result of an elimination.

    Attributes
    ----------
    elimination : Elimination
    bound : float
        Lower bound of the weighted sum; exact where no bucket was split.
    tables : list of array
        Table of each bucket.
    lows : list of array
        Minimum of each table over the bucket's variable.
    """

    elimination: Elimination
    bound: float
    tables: list[Array]
    lows: list[Array]

    def excess(self, index: int) -> Array:
        """Return how much each value of a bucket's variable exceeds the best one; shape (scope, values)."""
        return np.ascontiguousarray(np.moveaxis(self.tables[index] - self.lows[index], 0, -1))

    def choices(self) -> Choices:
        """Return the choice that attains :attr:`bound` (where no bucket was split); the first of equal ones."""
        sizes, buckets = self.elimination.sums.sizes, self.elimination.buckets
        result = np.zeros(len(sizes), np.int64)
        excess = {variable: np.zeros(sizes[variable]) for variable in self.elimination.order}
        for index in reversed(range(len(buckets))):
            bucket = buckets[index]
            here = tuple(result[v] for v in bucket.scope)
            # In reverse order all variables of the scope have their values already.
            row = excess[bucket.variable]
            row += self.tables[index][(slice(None), *here)] - self.lows[index][here]
            # Buckets of one variable are consecutive: the last one makes the final choice.
            result[bucket.variable] = row.argmin()
        return result

    def marginals(self) -> list[Array]:
        """Return for each variable a lower bound of the weighted sum with each of its values; shape (values)."""
        sizes, buckets = self.elimination.sums.sizes, self.elimination.buckets
        result = [np.full(size, self.bound) for size in sizes]
        beliefs: dict[int, Array] = {}
        for index in reversed(range(len(buckets))):
            bucket = buckets[index]
            beliefs[index] = self.tables[index] - self.lows[index] + self._inherited_bound(bucket, beliefs)
            least = beliefs[index].min(axis=tuple(range(1, 1 + len(bucket.scope))))
            result[bucket.variable] = np.maximum(result[bucket.variable], least)
        return result

    def _inherited_bound(self, bucket: Bucket, beliefs: dict[int, Array]) -> Array:
        """Return a lower bound for each choice of the bucket's scope; shape (scope)."""
        if bucket.parent is None:
            return np.array(self.bound)
        parent = self.elimination.buckets[bucket.parent]
        # As in run(): the parent's variable is its first axis, and the last one of the bucket's scope.
        others = tuple(axis for axis, v in enumerate((parent.variable, *parent.scope)) if v not in bucket.scope)
        return np.moveaxis(beliefs[bucket.parent].min(axis=others), 0, -1)


def neighbours(sums: TableSums) -> Neighbours:
    """Return the variables that share a term with each variable."""
    result: Neighbours = [set() for _ in sums.sizes]
    for scope in sums.scopes:
        for variable in scope:
            result[variable].update(set(scope) - {variable})
    return result


def decision_order(sums: TableSums) -> tuple[int, ...]:
    """Return an order in which few decided variables stay relevant; if buckets do not fit, one with small buckets."""
    near = neighbours(sums)
    count = len(sums.sizes)
    # From the last variable on, so that of equally good orders of a chain of layers that of backpropagation is taken.
    starts = sorted({round(index * (count - 1) / (STARTS - 1)) for index in range(STARTS)}, reverse=True)
    orders = [line_order(sums.sizes, near, start) for start in starts]
    orders.append(tuple(reversed(min_fill_order(sums.sizes, near))))
    return min(orders, key=lambda order: order_cost(sums.sizes, near, order))


def line_order(sizes: Sequence[int], near: Neighbours, start: int) -> tuple[int, ...]:
    """Return an order from ``start`` that keeps few combinations of decided variables open.

    A decided variable is open as long as it has undecided neighbours. Ties go to the neighbour of the variable that was
    decided first, so that it is closed early.

    Parameters
    ----------
    sizes : sequence of int
        Number of values of each variable.
    near : list of set of int
        Neighbours of each variable.
    start : int
        First variable.

    Returns
    -------
    tuple of int
    """
    undecided = set(range(len(sizes)))
    position: dict[int, int] = {}

    def decide(variable: int) -> None:
        position[variable] = len(position)
        undecided.discard(variable)

    def cost(variable: int) -> tuple[float, int, int]:
        closed = [v for v in near[variable] if v in position and near[v] & undecided == {variable}]
        opened = math.log(sizes[variable]) if near[variable] & undecided else 0.0
        oldest = min(position[v] for v in near[variable] if v in position)
        # Rounded, so that ties are ties on every platform, and the index decides the last ones.
        return round(opened - sum(math.log(sizes[v]) for v in closed), 9), oldest, variable

    decide(start)
    while undecided:
        # Parts of the graph that share no term start one after the other.
        reached = {v for v in undecided if near[v] - undecided}
        decide(min(reached, key=cost) if reached else max(undecided))
    return tuple(position)


def min_fill_order(sizes: Sequence[int], near: Neighbours) -> list[int]:
    """Return an order of elimination: next the variable that makes the fewest variables new neighbours.

    Parameters
    ----------
    sizes, near
        As in :func:`line_order`.

    Returns
    -------
    list of int
    """
    graph = {variable: set(others) for variable, others in enumerate(near)}

    def cost(variable: int) -> tuple[int, float, int]:
        others = graph[variable]
        fill = sum(len(others - graph[other]) - 1 for other in others)
        return fill, sum(math.log(sizes[v]) for v in others), variable

    result = []
    while graph:
        variable = min(graph, key=cost)
        result.append(variable)
        others = graph.pop(variable)
        for other in others:
            graph[other] = (graph[other] | others) - {variable, other}
    return result


def order_cost(sizes: Sequence[int], near: Neighbours, order: Sequence[int]) -> tuple[float, float]:
    """Return how far the largest bucket exceeds the limit (as a logarithm), and the work of a search in this order.

    Parameters
    ----------
    sizes, near
        As in :func:`line_order`.
    order : sequence of int

    Returns
    -------
    tuple of float
    """
    largest = 0.0
    work = 0.0
    graph = [set(others) for others in near]
    for variable in reversed(order):
        others = graph[variable]
        largest = max(largest, sum(math.log(sizes[v]) for v in {variable, *others}))
        for other in others:
            graph[other] = (graph[other] | others) - {variable, other}
    undecided = set(order)
    open_variables: set[int] = set()
    for variable in order:
        undecided.discard(variable)
        # e^700 is about the largest float.
        work += math.exp(min(sum(math.log(sizes[v]) for v in {variable, *open_variables}), 700))
        open_variables = {v for v in {variable, *open_variables} if near[v] & undecided}
    return max(0.0, largest - math.log(BUCKET_ENTRIES)), work
