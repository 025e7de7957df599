"""The best choice of candidates: fastest within a memory limit, or smallest, with a proven bound.

Few combinations are tried all. Otherwise rounds, each with more labels than the one before:

1. Weights of the sums (multipliers) whose additive minimum, found by elimination, is the largest lower bound. Every
   choice met on the way is improved one variable at a time and may become the best.
2. Values that no choice better than the best can have (by their marginals) are dropped.
3. A label search with these bounds, which finds better choices, closes the gap, or raises the bound.

Source: DESIGN.md, 7; Dryden et al. 2019, V-C, whose shortest path is the first step with one choice of weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distconv.errors import DistconvError
from distconv.perfmodel.cost.cost_tables import Array, AssignmentProblem, Choices, Sums, one
from distconv.perfmodel.strategy.bucket_elimination import Elimination, decision_order
from distconv.perfmodel.strategy.label_search import TOLERANCE, LabelSearch
from distconv.perfmodel.strategy.lagrange_multipliers import best_weights

FEW = 20_000
"""So many combinations are enumerated."""

CHUNK = 4096
"""Combinations enumerated at a time."""

ROUNDING = 1e-12
"""By so much (relative) more memory still fits."""

CLOSED = 1e-9
"""A gap below this is rounding."""

WIDTHS = (300, 3_000, 30_000, 100_000)
"""Labels of one round after the other."""

WEIGHT_ROUNDS = 150

WORTHWHILE = 0.9
"""Weights are improved again when at most this share of the values is left."""

INFEASIBLE = 1e9
"""Above every cost of a choice that is allowed."""


@dataclass(frozen=True)
class Solution:
    """A choice, its time (seconds) and memory (bytes), and ``bound``: no choice that fits is faster.

    ``optimal``: no choice is faster than this one; that is proven, up to rounding.
    """

    choices: tuple[int, ...]
    time: float
    memory: float
    bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """How much slower than the bound, as a fraction of it."""
        return excess(self.time, self.bound)


@dataclass(frozen=True)
class Smallest(Solution):
    """A choice that takes little memory; ``bound`` is of the memory."""

    @property
    def gap(self) -> float:
        """How much larger than the bound, as a fraction of it."""
        return excess(self.memory, self.bound)


class Infeasible(DistconvError, ValueError):
    """No choice is known that fits into the memory.

    ``choices`` is the smallest that was found, ``smallest`` its bytes; no choice has fewer than ``bound``.
    """

    def __init__(self, limit: float, smallest: Smallest):
        self.choices, self.smallest, self.bound = smallest.choices, smallest.memory, smallest.bound
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
    few: int = FEW,
) -> Solution:
    """The fastest choice whose memory is at most ``limit`` bytes (up to rounding); of equal ones always the same.

    ``starts`` are choices to begin with; the result is not slower than any of them that fits. After about ``seconds``
    the search ends with what it has, and only then does the result depend on the speed of the machine. Up to ``few``
    combinations are all tried.

    Raises
    ------
    Infeasible
        If no choice is found to fit.
    """
    deadline = time.perf_counter() + seconds
    if problem.combinations <= few:
        return fastest_of_all(problem, limit)
    sums = problem.time_sums()
    feasible = _known(problem, starts)
    scale = _scale(sums, feasible)
    sums = sums.scaled(1 / scale)
    if limit is not None:
        # A power of two: bytes stay exact.
        memory_scale = 2.0 ** math.frexp(limit)[1]
        sums = sums.subject_to(problem.memory_sums().scaled(1 / memory_scale), limit / memory_scale)

    def cost(choices: Choices) -> float:
        allowed = limit is None or fits(problem.memories(choices), limit)
        return float(problem.times(choices)) / scale if allowed else np.inf

    minimum = Minimum(sums, cost, deadline)
    for choices in feasible:
        minimum.improve(choices)
    if limit is not None and minimum.best is None:
        smallest = smallest_memory(problem, starts, deadline - time.perf_counter(), few, limit)
        if not fits(np.array(smallest.memory), limit):
            raise Infeasible(limit, smallest)
        minimum.improve(one(smallest.choices))
    best, bound = minimum.found()
    return Solution(*described(problem, best), *proven(float(problem.times(best)), bound * scale))


def smallest_memory(
    problem: AssignmentProblem,
    starts: Sequence[Sequence[int]] = (),
    seconds: float = 20.0,
    few: int = FEW,
    enough: float = -np.inf,
) -> Smallest:
    """The choice of least memory, as :func:`solve` finds the fastest one; any of at most ``enough`` bytes will do."""
    deadline = time.perf_counter() + seconds
    if problem.combinations <= few:
        return smallest_of_all(problem)
    sums = problem.memory_sums()
    feasible = _known(problem, starts)
    scale = _scale(sums, feasible)
    minimum = Minimum(sums.scaled(1 / scale), lambda c: float(problem.memories(c)) / scale, deadline, enough / scale)
    for choices in feasible:
        minimum.improve(choices)
    best, bound = minimum.found()
    return Smallest(*described(problem, best), *proven(float(problem.memories(best)), bound * scale))


def _known(problem: AssignmentProblem, starts: Sequence[Sequence[int]]) -> list[Choices]:
    return [one(start) for start in starts] or [np.zeros(len(problem.sizes), np.int64)]


def _scale(sums: Sums, feasible: Sequence[Choices]) -> float:
    """Of the order of the minimum, not zero: what the known choices come to."""
    return min(float(worst(sums, sums.values(improved(sums, choices)))) for choices in feasible) or 1.0


def described(problem: AssignmentProblem, choices: Choices) -> tuple[tuple[int, ...], float, float]:
    """``choices`` as they are returned, with their time and memory."""
    return tuple(int(choice) for choice in choices), float(problem.times(choices)), float(problem.memories(choices))


def proven(value: float, bound: float) -> tuple[float, bool]:
    """The bound of a minimised ``value``, and whether no more than rounding is between them."""
    closed = bound >= value * (1 - CLOSED)
    return value if closed else bound, closed


def fits(memory: Array, limit: float) -> npt.NDArray[np.bool_]:
    """Return True if ``memory`` is at most ``limit`` up to rounding, which is less than a byte."""
    return memory <= limit * (1 + ROUNDING)


def excess(value: float, bound: float) -> float:
    """``value / bound - 1``, of two zeros zero."""
    if bound > 0:
        return value / bound - 1
    return 0.0 if value == bound else np.inf


class Minimum:
    """The search for the choice of least ``cost``: that of the ``sums``, of the order of one; infinite: not allowed.

    It ends at a cost of at most ``enough``, or at the ``deadline``.
    """

    def __init__(self, sums: Sums, cost: Callable[[Choices], float], deadline: float, enough: float = -np.inf):
        self.sums, self.cost, self.deadline, self.enough = sums, cost, deadline, enough
        self.best: Choices | None = None
        self.value = np.inf
        self.bound = -np.inf
        self._kept = [np.arange(size) for size in sums.sizes]
        self._weights = np.zeros(len(sums.rows))
        self._weights[: sums.objective] = 1 / sums.objective

    def offer(self, choices: Choices) -> None:
        """Take ``choices`` if they are better than the best."""
        if (cost := self.cost(choices)) < self.value:
            self.best, self.value = choices.copy(), cost

    def improve(self, choices: Choices) -> None:
        """Offer ``choices``, and what changing one variable at a time makes of them."""
        self.offer(choices)
        self.offer(improved(self.sums, choices))

    def found(self) -> tuple[Choices, float]:
        """The best choice, and a bound of the cost of all."""
        for width in WIDTHS:
            self._round(width)
            if self._finished():
                break
        assert self.best is not None
        return self.best, self.bound

    def _round(self, width: int) -> None:
        self._weigh()
        while not self._finished() and self._drop():
            self._weigh()
        if self._finished():
            return
        labels = LabelSearch(self._elimination(), self._weights, self._threshold, self.bound)
        choices, cut = labels.run(width, self._expired)
        for row in choices:
            self.improve(self._whole(row))
            if not np.isfinite(self.cost(self._whole(row))):
                # Rounding at the limit decided, and may have ended the label of one that fits.
                cut = -np.inf
        self._raise(cut)

    def _elimination(self) -> Elimination:
        return Elimination(self.sums.restricted(self._kept), self._order)

    def _weigh(self) -> None:
        """Find an order, and better weights, for the values that are left."""
        self._order = decision_order(self.sums.restricted(self._kept))

        def found(choices: Choices) -> None:
            self.improve(self._whole(choices))

        def finished(bound: float) -> bool:
            self._raise(bound)
            return self._finished()

        self._weights = best_weights(self._elimination(), self._weights, WEIGHT_ROUNDS, finished, found)

    def _drop(self) -> bool:
        """Leave out the values that no better choice has; whether that were so many that weights may improve."""
        before = sum(len(values) for values in self._kept)
        marginals = self._elimination().run(self._weights).marginals()
        alive = [marginal <= self._threshold for marginal in marginals]
        if not all(values.any() for values in alive):
            self._raise(np.inf)
            return False
        self._kept = [kept[values] for kept, values in zip(self._kept, alive, strict=True)]
        return sum(len(values) for values in self._kept) < WORTHWHILE * before

    def _whole(self, choices: Choices) -> Choices:
        return np.array([kept[choice] for kept, choice in zip(self._kept, choices, strict=True)], dtype=np.int64)

    @property
    def _threshold(self) -> float:
        """A choice that costs more is not better than the best."""
        return self.value * (1 - CLOSED / 2)

    def _raise(self, bound: float) -> None:
        """``bound`` holds for every choice below the threshold."""
        self.bound = max(self.bound, min(bound, self._threshold))

    def _expired(self) -> bool:
        return time.perf_counter() > self.deadline

    def _finished(self) -> bool:
        closed = self.bound >= self.value * (1 - CLOSED)
        return closed or self.value <= self.enough or self._expired()


def improved(sums: Sums, choices: Choices) -> Choices:
    """``choices`` after changing one variable at a time to its best value for as long as that helps."""
    choices = choices.copy()
    values = sums.values(choices)
    unchanged = 0
    while unchanged < len(sums.sizes):
        for variable in range(len(sums.sizes)):
            tried = values + sums.changes(choices, variable)
            costs = worst(sums, tried)
            unchanged += 1
            if costs.min() < worst(sums, values) * (1 - CLOSED):
                choices[variable] = costs.argmin()
                values, unchanged = sums.values(choices), 0
    return choices


def worst(sums: Sums, values: Array) -> Array:
    """The largest of the sums to be minimised, or, where others pass zero, more than ``INFEASIBLE``; shape (...)."""
    objective: Array = values[..., : sums.objective].max(axis=-1)
    if sums.objective == values.shape[-1]:
        return objective
    passed = values[..., sums.objective :].max(axis=-1)
    return np.where(passed > TOLERANCE, INFEASIBLE * (1 + passed), objective)


def fastest_of_all(problem: AssignmentProblem, limit: float | None) -> Solution:
    """The fastest of all choices within the memory limit, the first of equal ones.

    Raises
    ------
    Infeasible
        If none is.
    """
    best, least = enumerated(problem, problem.times, np.inf if limit is None else limit)
    if best is None:
        assert limit is not None
        raise Infeasible(limit, smallest_of_all(problem))
    return Solution(*described(problem, best), least, True)


def smallest_of_all(problem: AssignmentProblem) -> Smallest:
    """The choice of least memory of all, the first of equal ones."""
    best, least = enumerated(problem, problem.memories, np.inf)
    assert best is not None
    return Smallest(*described(problem, best), least, True)


def enumerated(
    problem: AssignmentProblem, cost: Callable[[Choices], Array], limit: float
) -> tuple[Choices | None, float]:
    """The first choice of least ``cost`` among those whose memory is at most ``limit``."""
    best, least = None, np.inf
    for start in range(0, problem.combinations, CHUNK):
        count = min(CHUNK, problem.combinations - start)
        choices = np.stack(np.unravel_index(np.arange(start, start + count), problem.sizes), axis=-1)
        costs = np.where(fits(problem.memories(choices), limit), cost(choices), np.inf)
        if costs.min() < least:
            best, least = choices[costs.argmin()], float(costs.min())
    return best, least
