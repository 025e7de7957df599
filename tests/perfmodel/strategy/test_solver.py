"""The planner's search against the recurrences in plain Python over every choice, and what its bounds promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.errors import DistconvError
from distconv.perfmodel.strategy import label_search
from distconv.perfmodel.strategy.bucket_elimination import Elimination, decision_order
from distconv.perfmodel.strategy.cost_tables import Kind, Problem, Step, one
from distconv.perfmodel.strategy.solver import Infeasible, smallest_memory, solve

NONE = 0
"""As many combinations as are enumerated where the search itself is tested."""


def plain_time(problem, choice):
    """The docstring of perfmodel/strategy/cost_tables.py, one step after the other."""
    clock = end = 0.0
    for step in problem.time:
        term = float(step.table[tuple(choice[v] for v in step.variables)])
        if step.kind is Kind.COMPUTE:
            clock += term
        else:
            end = max(end, clock) + term
    return max(clock, end)


def plain_memory(problem, choice):
    resident = kept = peak = 0.0
    for step in problem.memory:
        term = float(step.table[tuple(choice[v] for v in step.variables)])
        if step.kind is Kind.RESIDENT:
            resident += term
        elif step.kind is Kind.KEEP:
            kept += term
        elif step.kind is Kind.RELEASE:
            kept -= term
        else:
            peak = max(peak, kept + term)
    return resident + max(peak, kept)


def brute_force(problem, limit=None):
    """Least time within the limit (infinite where nothing fits) and least memory, over all choices."""
    best = smallest = float("inf")
    for choice in itertools.product(*map(range, problem.sizes)):
        memory = plain_memory(problem, choice)
        smallest = min(smallest, memory)
        if limit is None or memory <= limit * (1 + 1e-12):
            best = min(best, plain_time(problem, choice))
    return best, smallest


def random_problem(seed, sizes=None, allreduces=1.0, density=0.4):
    """Forward and backward steps of a random graph: chains, skips, joins and separate parts, overlap that matters."""
    random = np.random.default_rng(seed)
    if sizes is None:
        sizes = tuple(int(size) for size in random.integers(1, 5, random.integers(1, 6)))
    count = len(sizes)
    chained = random.random() < 0.7
    edges = [
        (u, v)
        for u in range(count)
        for v in range(u + 1, count)
        if (chained and v == u + 1) or random.random() < density
    ]

    def table(*variables):
        scale = random.choice([0.0, 0.3, 1.0, 3.0])
        return np.round(scale * random.random(tuple(sizes[v] for v in variables)), int(random.choice([1, 12])))

    def steps(kind, variable, chance):
        return [Step(kind, (variable,), table(variable))] if random.random() < chance else []

    shuffles = {edge: table(*edge) for edge in edges}
    forward = []
    for v in range(count):
        forward += [Step(Kind.COMPUTE, edge, shuffles[edge]) for edge in edges if edge[1] == v]
        forward += steps(Kind.COMPUTE, v, 0.9)
    backward = []
    for v in reversed(range(count)):
        backward += steps(Kind.COMPUTE, v, 0.9)
        backward += steps(Kind.ALLREDUCE, v, 0.8 * allreduces)
        backward += steps(Kind.ALLREDUCE, v, 0.1 * allreduces)
        backward += steps(Kind.COMPUTE, v, 0.5)
        backward += [Step(Kind.COMPUTE, (b, a), shuffles[a, b].T) for a, b in edges if b == v]
    memory = []
    for v in range(count):
        memory += steps(Kind.RESIDENT, v, 0.8) + steps(Kind.KEEP, v, 0.8) + steps(Kind.TRANSIENT, v, 0.8)
        memory += [Step(Kind.TRANSIENT, edge, table(*edge)) for edge in edges if edge[1] == v and random.random() < 0.3]
    for keep in [step for step in reversed(memory) if step.kind is Kind.KEEP]:
        if random.random() < 0.4:
            memory += [Step(Kind.TRANSIENT, (), np.array(0.1)), Step(Kind.RELEASE, keep.variables, keep.table)]
            memory += steps(Kind.TRANSIENT, keep.variables[0], 0.5)
    if random.random() < 0.3:
        forward.append(Step(Kind.COMPUTE, (), np.array(0.25)))
        memory.append(Step(Kind.RESIDENT, (), np.array(0.25)))
    return Problem(sizes, tuple(forward + backward), tuple(memory))


def valid(problem, choices):
    return len(choices) == len(problem.sizes) and all(0 <= c < s for c, s in zip(choices, problem.sizes, strict=True))


def close(left, right):
    return left == pytest.approx(right, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_fastest_choice_is_the_one_of_brute_force(few):
    for seed in range(120):
        problem = random_problem(seed)
        found = solve(problem, few=few)
        best, _ = brute_force(problem)
        assert found.optimal and close(found.time, best) and close(found.bound, best), seed
        assert valid(problem, found.choices), seed
        assert close(plain_time(problem, found.choices), found.time), seed
        assert close(plain_memory(problem, found.choices), found.memory), seed


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_fastest_choice_within_a_memory_limit_is_the_one_of_brute_force(few):
    for seed in range(150, 190):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        for limit in (smallest, smallest + 0.5):
            best, _ = brute_force(problem, limit)
            found = solve(problem, limit, few=few)
            assert found.optimal and close(found.time, best) and found.memory <= limit * (1 + 1e-12), (seed, limit)


def test_a_limit_of_whole_bytes_is_met_to_the_byte():
    for seed in range(300, 315):
        problem = in_bytes(random_problem(seed))
        _, smallest = brute_force(problem)
        for limit in (smallest, smallest + 1.0):
            best, _ = brute_force(problem, limit)
            found = solve(problem, limit, few=NONE)
            assert close(found.time, best) and found.memory <= limit, (seed, limit)
        with pytest.raises(Infeasible):
            solve(problem, smallest - 1.0, few=NONE)


def in_bytes(problem):
    """``problem`` with memory in whole bytes, of the order of 10 GB."""
    tables = {id(step.table): np.round(step.table * 1e10) for step in problem.memory}
    memory = tuple(Step(step.kind, step.variables, tables[id(step.table)]) for step in problem.memory)
    resident = Step(Kind.RESIDENT, (), np.array(1e10))
    return Problem(problem.sizes, problem.time, (resident, *memory))


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_a_limit_that_nothing_fits_names_the_smallest_choice(few):
    for seed in range(30):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        with pytest.raises(Infeasible, match=r"the smallest known takes .*; give each rank more memory") as caught:
            solve(problem, smallest - 0.1, few=few)
        assert isinstance(caught.value, DistconvError) and isinstance(caught.value, ValueError)
        assert close(caught.value.smallest, smallest) and close(caught.value.bound, smallest)
        assert close(plain_memory(problem, caught.value.choices), smallest)


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
def test_the_smallest_memory_is_that_of_brute_force(few):
    for seed in range(50):
        problem = random_problem(seed)
        _, smallest = brute_force(problem)
        found = smallest_memory(problem, few=few)
        assert found.optimal and close(found.memory, smallest) and found.gap == 0, seed
        assert close(plain_memory(problem, found.choices), smallest), seed


def test_bounds_hold_and_starts_are_kept_when_there_is_no_time():
    for seed in range(60):
        problem = random_problem(seed, allreduces=1.2)
        best, _ = brute_force(problem)
        start = [size - 1 for size in problem.sizes]
        found = solve(problem, None, [start], 0.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
        assert found.time <= plain_time(problem, start), seed


def test_bounds_hold_and_starts_are_kept_when_few_labels_are(monkeypatch):
    monkeypatch.setattr("distconv.perfmodel.strategy.solver.WIDTHS", (1, 2))
    proven = 0
    for seed in range(30):
        problem = random_problem(seed, (4, 3, 4, 2, 4), 1.2)
        best, smallest = brute_force(problem)
        start = [0] * 5
        found = solve(problem, None, [start], 20.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
        assert found.time <= plain_time(problem, start), seed
        if found.optimal:
            proven += 1
            assert close(found.time, best), seed
        best, _ = brute_force(problem, smallest + 0.3)
        found = solve(problem, smallest + 0.3, [start], 20.0, NONE)
        assert found.bound <= best * (1 + 1e-9) and best <= found.time * (1 + 1e-12), seed
    assert 0 < proven < 30


def test_a_start_that_is_the_best_is_returned_by_its_time():
    for seed in range(20):
        problem = random_problem(seed, (3, 3, 3))
        choices = list(itertools.product(*map(range, problem.sizes)))
        best = min(choices, key=lambda choice: plain_time(problem, choice))
        assert solve(problem, None, [best], 0.0, NONE).time == float(problem.times(one(best)))


def test_the_same_problem_has_the_same_answer():
    for seed in range(10):
        problem = layers(seed, 8, 6, skips=2)
        again = Problem(problem.sizes, problem.time, problem.memory)
        assert solve(problem) == solve(again)


def test_of_equal_choices_the_first_is_enumerated():
    table = np.array([2.0, 1.0, 1.0])
    problem = Problem((3, 3), (Step(Kind.COMPUTE, (0,), table), Step(Kind.COMPUTE, (1,), table)), ())
    assert solve(problem).choices == (1, 1)
    assert smallest_memory(problem).choices == (0, 0)


@pytest.mark.parametrize("few", [20_000, NONE], ids=["enumerated", "searched"])
@pytest.mark.parametrize(
    "sizes, steps, expected",
    [
        pytest.param((1,), [(Kind.COMPUTE, (0,), [2.0])], 2.0, id="one variable of one value"),
        pytest.param((4,), [(Kind.COMPUTE, (0,), [4.0, 3.0, 1.0, 2.0])], 1.0, id="one variable"),
        pytest.param((3, 4), [], 0.0, id="no steps"),
        pytest.param((3, 4), [(Kind.COMPUTE, (0, 1), np.zeros((3, 4)))], 0.0, id="nothing but zeros"),
        pytest.param(
            (2, 2), [(Kind.ALLREDUCE, (0,), [3.0, 2.0]), (Kind.COMPUTE, (1,), [1.0, 5.0])], 2.0, id="no edges"
        ),
        pytest.param((2, 2), [(Kind.COMPUTE, (1, 0), [[3.0, 2.0], [1.0, 4.0]])], 1.0, id="an edge backwards"),
        pytest.param((2, 1), [(Kind.COMPUTE, (0, 0), [[3.0, 0.0], [0.0, 2.0]])], 2.0, id="one variable twice"),
    ],
)
def test_small_and_empty_problems_have_their_answer(few, sizes, steps, expected):
    steps = tuple(Step(kind, variables, np.array(table)) for kind, variables, table in steps)
    found = solve(Problem(sizes, steps, ()), few=few)
    assert found.time == expected == found.bound and found.optimal and found.gap == 0 and found.memory == 0


def test_unrolled_sums_are_the_recurrences():
    for seed in range(60):
        problem = random_problem(seed)
        choices = np.array(list(itertools.product(*map(range, problem.sizes))))
        times, memories = problem.time_sums().values(choices), problem.memory_sums().values(choices)
        for choice, time_s, memory in zip(choices, times.max(axis=1), memories.max(axis=1), strict=True):
            assert close(time_s, plain_time(problem, choice)) and close(memory, plain_memory(problem, choice)), seed


def test_changes_are_differences_of_values():
    problem = random_problem(3, (4, 3, 4, 2))
    sums, choices = problem.time_sums(), one([3, 1, 2, 0])
    for variable, size in enumerate(problem.sizes):
        for value in range(size):
            other = choices.copy()
            other[variable] = value
            change = sums.values(other) - sums.values(choices)
            assert sums.changes(choices, variable)[value] == pytest.approx(change, abs=1e-12)


@pytest.mark.parametrize("entries", [None, 30, 4], ids=["whole", "split", "in pieces"])
def test_elimination_is_the_weighted_minimum_and_split_a_bound(entries):
    exact = 0
    for seed in range(80):
        problem = random_problem(seed, (3, 2, 4, 1, 3, 2), density=0.6)
        sums = problem.time_sums()
        weights = np.random.default_rng(seed).random(len(sums.rows))
        choices = np.array(list(itertools.product(*map(range, problem.sizes))))
        weighted = sums.values(choices) @ weights
        relaxation = Elimination(sums, decision_order(sums), entries).run(weights)
        assert relaxation.bound <= weighted.min() + 1e-9, seed
        exact += close(relaxation.bound, weighted.min())
        for variable, marginals in enumerate(relaxation.marginals()):
            least = [weighted[choices[:, variable] == value].min() for value in range(problem.sizes[variable])]
            assert (marginals <= np.array(least) + 1e-9).all(), seed
            assert entries or marginals == pytest.approx(least, abs=1e-9), seed
        if entries is None:
            assert close(float(sums.values(relaxation.choices()) @ weights), weighted.min()), seed
    assert exact == 80 if entries is None else exact < 80


def test_the_search_is_exact_where_buckets_are_split(monkeypatch):
    monkeypatch.setattr("distconv.perfmodel.strategy.bucket_elimination.BUCKET_ENTRIES", 12)
    for seed in range(15, 35):
        problem = random_problem(seed, (3, 2, 4, 3, 3), density=0.8)
        best, smallest = brute_force(problem)
        assert close(solve(problem, few=NONE).time, best), seed
        best, _ = brute_force(problem, smallest + 0.5)
        assert close(solve(problem, smallest + 0.5, few=NONE).time, best), seed


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_no_label_is_dropped_but_for_one_of_its_group_that_is_nowhere_worse(columns):
    random = np.random.default_rng(columns)
    for _ in range(50):
        keys = random.integers(0, 3, 40)
        values = np.round(random.random((40, columns)), 1)
        kept = set(label_search.undominated(keys, values).tolist())
        for label in set(range(40)) - kept:
            assert any(keys[k] == keys[label] and (values[k] <= values[label]).all() for k in kept)
        for label in kept if columns < 3 else ():
            others = [k for k in kept - {label} if keys[k] == keys[label]]
            assert not any((values[k] <= values[label]).all() for k in others)


def layers(seed, count, candidates, skips=0, nested=False, hub=None, allreduce=0.1):
    """A network as the planner sees it: time falls with the parts, halos do not, equal candidates need no shuffle."""
    random = np.random.default_rng(seed)
    parts = sorted({tuple(2 ** random.integers(0, 7, 2)) for _ in range(50 * candidates)})
    parts = np.array([parts[i] for i in random.permutation(len(parts))[:candidates]])
    edges = {(v, v + 1) for v in range(count - 1)}
    edges |= {(v - skips, v) for v in range(skips, count, skips)} if skips else set()
    edges |= {(v, count - 1 - v) for v in range(0, count // 2, 2)} if nested else set()
    edges |= {(v // hub * hub, v) for v in range(count) if v % hub} if hub else set()
    distance = np.abs(np.log2(parts)[:, None] - np.log2(parts)).sum(axis=-1)
    ranks = parts.prod(axis=1)
    shuffles = {edge: random.random() * 0.1 * distance / (1 + distance) for edge in sorted(edges)}
    forward, backward, memory = [], [], []
    for v in range(count):
        work, weights, halo = random.lognormal(0, 0.5, 3)
        compute = work / ranks + 0.004 * halo * np.log2(parts[:, 1]) * random.uniform(0.5, 1.5, candidates)
        incoming = [Step(Kind.COMPUTE, edge, shuffles[edge]) for edge in sorted(edges) if edge[1] == v]
        forward += [*incoming, Step(Kind.COMPUTE, (v,), compute)]
        reduced = Step(Kind.ALLREDUCE, (v,), allreduce * weights * (1 - 1 / ranks))
        backward = [Step(Kind.COMPUTE, (v,), compute), reduced, Step(Kind.COMPUTE, (v,), compute), *incoming, *backward]
        memory += [
            Step(Kind.RESIDENT, (v,), np.full(candidates, weights)),
            Step(Kind.KEEP, (v,), work / ranks),
            Step(Kind.TRANSIENT, (v,), 0.2 * work / parts[:, 0]),
        ]
    return Problem((candidates,) * count, tuple(forward + backward), tuple(memory))


LARGE = {
    "chain": {"count": 54, "candidates": 32},
    "residual": {"count": 54, "candidates": 32, "skips": 3},
    "nested skips": {"count": 23, "candidates": 40, "nested": True},
}


@pytest.mark.parametrize("allreduce", [0.01, 0.1, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LARGE)
def test_large_networks_have_a_small_proven_gap(name, allreduce):
    problem = layers(1, allreduce=allreduce, **LARGE[name])
    found = solve(problem)
    assert found.bound <= found.time == float(problem.times(one(found.choices)))
    assert found.gap <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("allreduce", [0.01, 0.1, 1.0])
def test_a_dense_network_has_a_small_proven_gap(allreduce):
    problem = layers(1, 120, 24, hub=30, allreduce=allreduce)
    found = solve(problem)
    assert found.bound <= found.time and found.gap <= 0.03


def test_a_memory_limit_on_a_large_network_is_met_with_a_small_gap():
    problem = layers(1, **LARGE["residual"])
    fastest, smallest = solve(problem), smallest_memory(problem)
    assert smallest.memory < fastest.memory
    limit = (smallest.memory + fastest.memory) / 2
    found = solve(problem, limit)
    assert found.memory <= limit and found.time >= fastest.bound and found.gap <= 0.03
