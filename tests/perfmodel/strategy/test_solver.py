"""The planner's search against the recurrences in plain Python over every choice, and what its bounds promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.errors import DistconvError
from distconv.perfmodel.cost.cost_tables import AssignmentProblem, CostKind, CostTerm, as_choice_array
from distconv.perfmodel.strategy.solver import Infeasible, SmallestChoice, Solution, smallest_memory, solve
from tests.perfmodel.strategy.problems import brute_force, is_close, random_problem, reference_memory, reference_time

NONE = 0
"""As many combinations as are enumerated where the search itself is tested."""


def valid(problem, choices):
    return len(choices) == len(problem.sizes) and all(0 <= c < s for c, s in zip(choices, problem.sizes, strict=True))


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_fastest_choice_is_the_one_of_brute_force(few):
    for seed in range(12):
        problem = random_problem(seed)
        found = solve(problem, few=few)
        best, _ = brute_force(problem)
        assert found.optimal and is_close(found.time, best) and is_close(found.bound, best), seed
        assert valid(problem, found.choices), seed
        assert is_close(reference_time(problem, found.choices), found.time), seed
        assert is_close(reference_memory(problem, found.choices), found.memory), seed


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_fastest_choice_within_a_memory_limit_is_the_one_of_brute_force(few):
    for seed in range(150, 156):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        for limit in (smallest, smallest + 0.5):
            best, _ = brute_force(problem, limit)
            found = solve(problem, limit, few=few)
            assert found.optimal and is_close(found.time, best) and found.memory <= limit * (1 + 1e-12), (seed, limit)


@pytest.mark.long
def test_a_limit_of_whole_bytes_is_met_to_the_byte():
    for seed in range(300, 304):
        problem = in_bytes(random_problem(seed))
        _, smallest = brute_force(problem)
        for limit in (smallest, smallest + 1.0):
            best, _ = brute_force(problem, limit)
            found = solve(problem, limit, few=NONE)
            assert is_close(found.time, best) and found.memory <= limit, (seed, limit)
        with pytest.raises(Infeasible):
            solve(problem, smallest - 1.0, few=NONE)


def in_bytes(problem):
    """``problem`` with memory in whole bytes, of the order of 10 GB."""
    tables = {id(step.table): np.round(step.table * 1e10) for step in problem.memory}
    memory = tuple(CostTerm(step.kind, step.variables, tables[id(step.table)]) for step in problem.memory)
    resident = CostTerm(CostKind.RESIDENT, (), np.array(1e10))
    return AssignmentProblem(problem.sizes, problem.time, (resident, *memory))


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_a_limit_that_nothing_fits_names_the_smallest_choice(few):
    for seed in range(12):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        with pytest.raises(Infeasible, match=r"the smallest known takes .*; give each rank more memory") as caught:
            solve(problem, smallest - 0.1, few=few)
        assert isinstance(caught.value, DistconvError) and isinstance(caught.value, ValueError)
        assert is_close(caught.value.smallest, smallest) and is_close(caught.value.bound, smallest)
        assert is_close(reference_memory(problem, caught.value.choices), smallest)


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_smallest_memory_is_that_of_brute_force(few):
    for seed in range(12):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        found = smallest_memory(problem, few=few)
        assert found.optimal and is_close(found.memory, smallest) and found.gap == 0, seed
        assert is_close(reference_memory(problem, found.choices), smallest), seed


def test_bounds_hold_and_starts_are_kept_when_there_is_no_time():
    for seed in range(12):
        problem = random_problem(seed, allreduces=1.2)
        best, _ = brute_force(problem)
        start = [size - 1 for size in problem.sizes]
        found = solve(problem, None, [start], 0.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
        assert found.time <= reference_time(problem, start), seed


def test_a_start_that_is_the_best_is_returned_by_its_time():
    for seed in range(12):
        problem = random_problem(seed, (3, 3, 3))
        choices = list(itertools.product(*map(range, problem.sizes)))
        best = min(choices, key=lambda choice: reference_time(problem, choice))
        assert solve(problem, None, [best], 0.0, NONE).time == float(problem.times(as_choice_array(best)))


def test_of_equal_choices_the_first_is_enumerated():
    table = np.array([2.0, 1.0, 1.0])
    problem = AssignmentProblem(
        (3, 3), (CostTerm(CostKind.COMPUTE, (0,), table), CostTerm(CostKind.COMPUTE, (1,), table)), ()
    )
    assert solve(problem).choices == (1, 1)
    assert smallest_memory(problem).choices == (0, 0)


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
@pytest.mark.parametrize(
    "sizes, steps, expected",
    [
        pytest.param((1,), [(CostKind.COMPUTE, (0,), [2.0])], 2.0, id="one variable of one value"),
        pytest.param((4,), [(CostKind.COMPUTE, (0,), [4.0, 3.0, 1.0, 2.0])], 1.0, id="one variable"),
        pytest.param((3, 4), [], 0.0, id="no steps"),
        pytest.param((3, 4), [(CostKind.COMPUTE, (0, 1), np.zeros((3, 4)))], 0.0, id="nothing but zeros"),
        pytest.param(
            (2, 2), [(CostKind.ALLREDUCE, (0,), [3.0, 2.0]), (CostKind.COMPUTE, (1,), [1.0, 5.0])], 2.0, id="no edges"
        ),
        pytest.param((2, 2), [(CostKind.COMPUTE, (1, 0), [[3.0, 2.0], [1.0, 4.0]])], 1.0, id="an edge backwards"),
        pytest.param((2, 1), [(CostKind.COMPUTE, (0, 0), [[3.0, 0.0], [0.0, 2.0]])], 2.0, id="one variable twice"),
    ],
)
def test_small_and_empty_problems_have_their_answer(few, sizes, steps, expected):
    steps = tuple(CostTerm(kind, variables, np.array(table)) for kind, variables, table in steps)
    found = solve(AssignmentProblem(sizes, steps, ()), few=few)
    assert found.time == expected == found.bound and found.optimal and found.gap == 0 and found.memory == 0


def residual_network(seed, count, candidates, skips):
    """A network as the planner sees it: time falls with the parts, halos do not, equal candidates need no shuffle."""
    random = np.random.default_rng(seed)
    parts = sorted({tuple(2 ** random.integers(0, 7, 2)) for _ in range(50 * candidates)})
    parts = np.array([parts[i] for i in random.permutation(len(parts))[:candidates]])
    edges = {(v, v + 1) for v in range(count - 1)} | {(v - skips, v) for v in range(skips, count, skips)}
    distance = np.abs(np.log2(parts)[:, None] - np.log2(parts)).sum(axis=-1)
    ranks = parts.prod(axis=1)
    shuffles = {edge: random.random() * 0.1 * distance / (1 + distance) for edge in sorted(edges)}
    forward, backward, memory = [], [], []
    for v in range(count):
        work, weights, halo = random.lognormal(0, 0.5, 3)
        seconds = work / ranks + 0.004 * halo * np.log2(parts[:, 1]) * random.uniform(0.5, 1.5, candidates)
        compute = CostTerm(CostKind.COMPUTE, (v,), seconds)
        incoming = [CostTerm(CostKind.COMPUTE, edge, shuffles[edge]) for edge in sorted(edges) if edge[1] == v]
        reduced = CostTerm(CostKind.ALLREDUCE, (v,), 0.1 * weights * (1 - 1 / ranks))
        forward += [*incoming, compute]
        backward = [compute, reduced, compute, *incoming, *backward]
        memory += [
            CostTerm(CostKind.RESIDENT, (v,), np.full(candidates, weights)),
            CostTerm(CostKind.KEEP, (v,), work / ranks),
            CostTerm(CostKind.TRANSIENT, (v,), 0.2 * work / parts[:, 0]),
        ]
    return AssignmentProblem((candidates,) * count, tuple(forward + backward), tuple(memory))


@pytest.mark.long
def test_a_large_network_has_a_small_proven_gap_with_and_without_a_memory_limit():
    problem = residual_network(1, 54, 32, skips=3)
    fastest, smallest = solve(problem), smallest_memory(problem)
    assert fastest.bound <= fastest.time == float(problem.times(as_choice_array(fastest.choices)))
    assert fastest.gap <= 0.03 and smallest.memory < fastest.memory
    limit = (smallest.memory + fastest.memory) / 2
    found = solve(problem, limit)
    assert found.memory <= limit and found.time >= fastest.bound and found.gap <= 0.03


@pytest.mark.parametrize(
    ("bound", "proof"),
    [(2.5e9, ""), (2e9, ", though one of 2e+09 is not ruled out"), (1e9, ", though one of 1e+09 is not ruled out")],
)
def test_a_limit_that_nothing_fits_is_named_with_the_smallest_and_what_is_not_ruled_out(bound, proof):
    error = Infeasible(2e9, SmallestChoice((1, 0), time=3.0, memory=4e9, bound=bound, optimal=False))
    assert str(error) == (
        "no strategy was found that fits into 2e+09 bytes on each rank: the smallest known takes 4e+09"
        f"{proof}; give each rank more memory, or use more ranks or a smaller mini-batch"
    )
    assert (error.choices, error.smallest, error.bound) == ((1, 0), 4e9, bound)


def test_a_gap_is_of_the_time_or_of_the_memory_over_its_bound():
    assert Solution((0,), time=3.0, memory=8.0, bound=2.0, optimal=False).gap == pytest.approx(0.5)
    assert SmallestChoice((0,), time=3.0, memory=8.0, bound=2.0, optimal=False).gap == pytest.approx(3.0)
