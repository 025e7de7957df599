"""Fastest choice of candidates within a memory limit, or the smallest choice, with a proven bound.

Few combinations are enumerated. Otherwise the search runs in rounds, each with more labels than the one before:

1. Find weights of the sums (multipliers) whose additive minimum, found by elimination, is the largest lower bound.
   Every choice found on the way is improved one variable at a time and may become the best.
2. Drop values that no choice better than the best can have, by their marginals.
3. Run a label search with these bounds. It finds better choices, closes the gap, or raises the bound.

Source: Dryden et al. 2019, V-C, whose shortest path is the first step with one choice of weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distconv.errors import DistconvError
from distconv.perfmodel.cost.cost_tables import Array, AssignmentProblem, Choices, TableSums, as_choice_array
from distconv.perfmodel.strategy.bucket_elimination import Elimination, decision_order
from distconv.perfmodel.strategy.label_search import TOLERANCE, LabelSearch
from distconv.perfmodel.strategy.lagrange_multipliers import best_weights

MAX_ENUMERATED = 20_000
"""Most combinations that are enumerated."""

CHUNK = 4096
"""Combinations that are enumerated at a time."""

ROUNDING = 1e-12
"""Relative amount by which memory may exceed the limit."""

CLOSED = 1e-9
"""Relative gap below which a choice counts as optimal."""

WIDTHS = (300, 3_000, 30_000, 100_000)
"""Labels of the successive rounds."""

WEIGHT_ROUNDS = 150
"""Most rounds in which weights are improved at a time."""

WORTHWHILE = 0.9
"""Weights are improved again if at most this fraction of the values is left."""

INFEASIBLE = 1e9
"""Cost above that of every allowed choice."""


@dataclass(frozen=True)
class Solution:
    """A choice with its cost and a bound.

    Attributes
    ----------
    choices : tuple of int
        Index of each variable's candidate.
    time : float
        Seconds.
    memory : float
        Bytes.
    bound : float
        Lower bound in seconds: no choice that fits is faster. 0 or less if nothing is proven.
    optimal : bool
        True if no choice is faster, which is proven up to rounding. Otherwise unknown.
    """

    choices: tuple[int, ...]
    time: float
    memory: float
    bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """Relative difference between the time and the bound."""
        return relative_gap(self.time, self.bound)


@dataclass(frozen=True)
class SmallestChoice(Solution):
    """A choice that takes little memory; ``bound`` is in bytes."""

    @property
    def gap(self) -> float:
        """Relative difference between the memory and the bound."""
        return relative_gap(self.memory, self.bound)


class Infeasible(DistconvError, ValueError):
    """No choice is known that fits into the memory.

    Attributes
    ----------
    choices : tuple of int
        The smallest choice found.
    smallest : float
        Its bytes.
    bound : float
        No choice has fewer bytes.
    """

    def __init__(self, limit: float, smallest: SmallestChoice):
        self.choices, self.smallest, self.bound = smallest.choices, smallest.memory, smallest.bound
        # The search for the least memory may end by its time limit, so a smaller choice may exist.
        proof = "" if smallest.bound > limit else f", though one of {smallest.bound:.6g} is not ruled out"
        super().__init__(
            f"no strategy was found that fits into {limit:.6g} bytes on each rank: the smallest known takes "
            f"{smallest.memory:.6g}{proof}; give each rank more memory, or use more ranks or a smaller mini-batch"
        )


def solve(
    problem: AssignmentProblem,
    limit: float | None = None,
    starts: Sequence[Sequence[int]] = (),
    seconds: float = 20.0,
    few: int = MAX_ENUMERATED,
) -> Solution:
    """Find the fastest choice within a memory limit.

    The result depends on the speed of the computer only if the time limit ends the search.

    Parameters
    ----------
    problem : AssignmentProblem
    limit : float, optional
        Bytes. Default: none.
    starts : sequence of sequence of int
        Choices to begin with. The result is not slower than any of them that fits.
    seconds : float
        Approximate time limit.
    few : int
        Up to this many combinations are enumerated.

    Returns
    -------
    Solution

    Raises
    ------
    Infeasible
        If no choice that fits is found.
    """
    deadline = time.perf_counter() + seconds
    if problem.combinations <= few:
        return fastest_of_all(problem, limit)
    sums = problem.time_sums()
    feasible = _best_start(problem, starts)
    # Tolerances and step sizes are those for sums of the order of one.
    scale = _scale(sums, feasible)
    sums = sums.scale(1 / scale)
    if limit is not None:
        # Scaling by a power of two keeps bytes exact.
        memory_scale = 2.0 ** math.frexp(limit)[1]
        sums = sums.constrain(problem.memory_sums().scale(1 / memory_scale), limit / memory_scale)

    def cost(choices: Choices) -> float:
        # With the exact memory, since the tables of the search are rounded.
        allowed = limit is None or fits(problem.memories(choices), limit)
        return float(problem.times(choices)) / scale if allowed else np.inf

    minimum = BranchAndBound(sums, cost, deadline)
    for choices in feasible:
        minimum.improve(choices)
    # No start fits: find the smallest choice, which fits or proves that none does.
    if limit is not None and minimum.best is None:
        smallest = smallest_memory(problem, starts, deadline - time.perf_counter(), few, limit)
        if not fits(np.array(smallest.memory), limit):
            raise Infeasible(limit, smallest)
        minimum.improve(as_choice_array(smallest.choices))
    best, bound = minimum.search()
    return Solution(*with_costs(problem, best), *prove_bound(float(problem.times(best)), bound * scale))


def smallest_memory(
    problem: AssignmentProblem,
    starts: Sequence[Sequence[int]] = (),
    seconds: float = 20.0,
    few: int = MAX_ENUMERATED,
    enough: float = -np.inf,
) -> SmallestChoice:
    """Find the choice with the least memory.

    Parameters
    ----------
    problem, starts, seconds, few
        As in :func:`solve`.
    enough : float
        Bytes at which the search stops early.

    Returns
    -------
    SmallestChoice
    """
    deadline = time.perf_counter() + seconds
    if problem.combinations <= few:
        return smallest_of_all(problem)
    sums = problem.memory_sums()
    feasible = _best_start(problem, starts)
    scale = _scale(sums, feasible)
    minimum = BranchAndBound(
        sums.scale(1 / scale), lambda c: float(problem.memories(c)) / scale, deadline, enough / scale
    )
    for choices in feasible:
        minimum.improve(choices)
    best, bound = minimum.search()
    return SmallestChoice(*with_costs(problem, best), *prove_bound(float(problem.memories(best)), bound * scale))


def _best_start(problem: AssignmentProblem, starts: Sequence[Sequence[int]]) -> list[Choices]:
    return [as_choice_array(start) for start in starts] or [np.zeros(len(problem.sizes), np.int64)]


def _scale(sums: TableSums, feasible: Sequence[Choices]) -> float:
    """Return a number of the order of the minimum, not zero: the value of the best known choice."""
    return min(float(worst_sum(sums, sums.values(improve_choices(sums, choices)))) for choices in feasible) or 1.0


def with_costs(problem: AssignmentProblem, choices: Choices) -> tuple[tuple[int, ...], float, float]:
    """Return the choices as a tuple, with their time and memory.

    Parameters
    ----------
    problem : AssignmentProblem
    choices : array (variables)

    Returns
    -------
    tuple
    """
    return tuple(int(choice) for choice in choices), float(problem.times(choices)), float(problem.memories(choices))


def prove_bound(value: float, bound: float) -> tuple[float, bool]:
    """Return the bound of a minimized value, and True if they differ by rounding only.

    Parameters
    ----------
    value, bound : float

    Returns
    -------
    tuple of float and bool
    """
    closed = bound >= value * (1 - CLOSED)
    return value if closed else bound, closed


def fits(memory: Array, limit: float) -> npt.NDArray[np.bool_]:
    """Return True if memory is within a limit up to rounding, which is less than a byte.

    Parameters
    ----------
    memory : array
        Bytes.
    limit : float
        Bytes.

    Returns
    -------
    array of bool
    """
    return memory <= limit * (1 + ROUNDING)


def relative_gap(value: float, bound: float) -> float:
    """Return ``value / bound - 1``; 0 if both are zero.

    Parameters
    ----------
    value, bound : float

    Returns
    -------
    float
    """
    if bound > 0:
        return value / bound - 1
    return 0.0 if value == bound else np.inf


class BranchAndBound:
    """Search for the choice with the least cost.

    Parameters
    ----------
    sums : TableSums
        Sums of the order of one.
    cost : callable
        Cost of a choice; infinite if it is not allowed.
    deadline : float
        Time of ``time.perf_counter`` at which the search ends.
    enough : float
        Cost at which the search ends.
    """

    def __init__(self, sums: TableSums, cost: Callable[[Choices], float], deadline: float, enough: float = -np.inf):
        self.sums, self.cost, self.deadline, self.enough = sums, cost, deadline, enough
        self.best: Choices | None = None
        self.value = np.inf
        self.bound = -np.inf
        # Values that are left of each variable. Searches renumber them from 0; _renumber leads back.
        self._kept = [np.arange(size) for size in sums.sizes]
        self._weights = np.zeros(len(sums.rows))
        # Any weights of the sums give a lower bound; equal ones, and none of the constraints, are the start.
        self._weights[: sums.objective] = 1 / sums.objective

    def offer(self, choices: Choices) -> None:
        """Store ``choices`` if they are better than the best."""
        if (cost := self.cost(choices)) < self.value:
            self.best, self.value = choices.copy(), cost

    def improve(self, choices: Choices) -> None:
        """Offer ``choices``, and the result of changing one variable at a time."""
        self.offer(choices)
        self.offer(improve_choices(self.sums, choices))

    def search(self) -> tuple[Choices, float]:
        """Search, and return the best choice and a lower bound of the cost of all."""
        for width in WIDTHS:
            self._round(width)
            if self._is_finished():
                break
        assert self.best is not None
        return self.best, self.bound

    def _round(self, width: int) -> None:
        self._improve_weights()
        # Fewer values make the next elimination cheaper and its bound higher.
        while not self._is_finished() and self._drop_values():
            self._improve_weights()
        if self._is_finished():
            return
        labels = LabelSearch(self._elimination(), self._weights, self._threshold, self.bound)
        choices, cut = labels.run(width, self._is_expired)
        for row in choices:
            self.improve(self._renumber(row))
            if not np.isfinite(self.cost(self._renumber(row))):
                # Rounding at the limit may also have ended the label of a choice that fits, so the bound does not hold.
                cut = -np.inf
        self._raise_bound(cut)

    def _elimination(self) -> Elimination:
        return Elimination(self.sums.restrict(self._kept), self._order)

    def _improve_weights(self) -> None:
        """Find an order and better weights for the values that are left."""
        self._order = decision_order(self.sums.restrict(self._kept))

        def found(choices: Choices) -> None:
            self.improve(self._renumber(choices))

        def finished(bound: float) -> bool:
            self._raise_bound(bound)
            return self._is_finished()

        self._weights = best_weights(self._elimination(), self._weights, WEIGHT_ROUNDS, finished, found)

    def _drop_values(self) -> bool:
        """Drop the values that no better choice has. Return True if enough were dropped for the weights to improve."""
        before = sum(len(values) for values in self._kept)
        marginals = self._elimination().run(self._weights).marginals()
        alive = [marginal <= self._threshold for marginal in marginals]
        # No choice is below the threshold: the best one is proven optimal.
        if not all(values.any() for values in alive):
            self._raise_bound(np.inf)
            return False
        self._kept = [kept[values] for kept, values in zip(self._kept, alive, strict=True)]
        return sum(len(values) for values in self._kept) < WORTHWHILE * before

    def _renumber(self, choices: Choices) -> Choices:
        return np.array([kept[choice] for kept, choice in zip(self._kept, choices, strict=True)], dtype=np.int64)

    @property
    def _threshold(self) -> float:
        """Cost above which a choice is not better than the best."""
        return self.value * (1 - CLOSED / 2)

    def _raise_bound(self, bound: float) -> None:
        """Raise the lower bound to ``bound``, which holds for every choice below the threshold."""
        self.bound = max(self.bound, min(bound, self._threshold))

    def _is_expired(self) -> bool:
        return time.perf_counter() > self.deadline

    def _is_finished(self) -> bool:
        closed = self.bound >= self.value * (1 - CLOSED)
        return closed or self.value <= self.enough or self._is_expired()


def improve_choices(sums: TableSums, choices: Choices) -> Choices:
    """Return ``choices`` after changing one variable at a time to its best value for as long as that helps.

    Parameters
    ----------
    sums : TableSums
    choices : array (variables)

    Returns
    -------
    array (variables)
    """
    choices = choices.copy()
    values = sums.values(choices)
    unchanged = 0
    # Coordinate descent, until a full cycle over the variables changes nothing.
    while unchanged < len(sums.sizes):
        for variable in range(len(sums.sizes)):
            tried = values + sums.sum_changes(choices, variable)
            costs = worst_sum(sums, tried)
            unchanged += 1
            # Improvements within rounding could alternate forever.
            if costs.min() < worst_sum(sums, values) * (1 - CLOSED):
                choices[variable] = costs.argmin()
                values, unchanged = sums.values(choices), 0
    return choices


def worst_sum(sums: TableSums, values: Array) -> Array:
    """Return the largest of the sums to be minimized, or more than ``INFEASIBLE`` if a constraint is violated.

    Parameters
    ----------
    sums : TableSums
    values : array (..., rows)

    Returns
    -------
    array (...)
    """
    objective: Array = values[..., : sums.objective].max(axis=-1)
    if sums.objective == values.shape[-1]:
        return objective
    passed = values[..., sums.objective :].max(axis=-1)
    # Proportional to the excess, so that coordinate descent finds its way to choices that fit.
    return np.where(passed > TOLERANCE, INFEASIBLE * (1 + passed), objective)


def fastest_of_all(problem: AssignmentProblem, limit: float | None) -> Solution:
    """Return the fastest of all choices within the memory limit, the first of equal ones.

    Parameters
    ----------
    problem : AssignmentProblem
    limit : float or None
        Bytes.

    Returns
    -------
    Solution

    Raises
    ------
    Infeasible
        If no choice fits.
    """
    best, least = enumerate_choices(problem, problem.times, np.inf if limit is None else limit)
    if best is None:
        assert limit is not None
        raise Infeasible(limit, smallest_of_all(problem))
    return Solution(*with_costs(problem, best), least, True)


def smallest_of_all(problem: AssignmentProblem) -> SmallestChoice:
    """Return the choice with the least memory, the first of equal ones."""
    best, least = enumerate_choices(problem, problem.memories, np.inf)
    assert best is not None
    return SmallestChoice(*with_costs(problem, best), least, True)


def enumerate_choices(
    problem: AssignmentProblem, cost: Callable[[Choices], Array], limit: float
) -> tuple[Choices | None, float]:
    """Return the first choice with the least cost among those within the memory limit, and its cost.

    Parameters
    ----------
    problem : AssignmentProblem
    cost : callable
        Cost of choices (..., variables).
    limit : float
        Bytes.

    Returns
    -------
    tuple of (array or None) and float
    """
    # In chunks, since memory grows with combinations times terms.
    best, least = None, np.inf
    for start in range(0, problem.combinations, CHUNK):
        count = min(CHUNK, problem.combinations - start)
        choices = np.stack(np.unravel_index(np.arange(start, start + count), problem.sizes), axis=-1)
        costs = np.where(fits(problem.memories(choices), limit), cost(choices), np.inf)
        if costs.min() < least:
            best, least = choices[costs.argmin()], float(costs.min())
    return best, least
