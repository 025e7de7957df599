"""Random problems of the planner, and their recurrences in plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distconv.perfmodel.cost.cost_tables import AssignmentProblem, CostKind, CostTerm


def reference_time(problem, choice):
    """The docstring of perfmodel/cost/cost_tables.py, one step after the other."""
    clock = end = 0.0
    for step in problem.time:
        term = float(step.table[tuple(choice[v] for v in step.variables)])
        if step.kind is CostKind.COMPUTE:
            clock += term
        else:
            end = max(end, clock) + term
    return max(clock, end)


def reference_memory(problem, choice):
    resident = kept = peak = 0.0
    for step in problem.memory:
        term = float(step.table[tuple(choice[v] for v in step.variables)])
        if step.kind is CostKind.RESIDENT:
            resident += term
        elif step.kind is CostKind.KEEP:
            kept += term
        elif step.kind is CostKind.RELEASE:
            kept -= term
        else:
            peak = max(peak, kept + term)
    return resident + max(peak, kept)


def brute_force(problem, limit=None):
    """Least time within the limit (infinite where nothing fits) and least memory, over all choices."""
    best = smallest = float("inf")
    for choice in itertools.product(*map(range, problem.sizes)):
        memory = reference_memory(problem, choice)
        smallest = min(smallest, memory)
        if limit is None or memory <= limit * (1 + 1e-12):
            best = min(best, reference_time(problem, choice))
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
        return [CostTerm(kind, (variable,), table(variable))] if random.random() < chance else []

    shuffles = {edge: table(*edge) for edge in edges}
    forward = []
    for v in range(count):
        forward += [CostTerm(CostKind.COMPUTE, edge, shuffles[edge]) for edge in edges if edge[1] == v]
        forward += steps(CostKind.COMPUTE, v, 0.9)
    backward = []
    for v in reversed(range(count)):
        backward += steps(CostKind.COMPUTE, v, 0.9)
        backward += steps(CostKind.ALLREDUCE, v, 0.8 * allreduces)
        backward += steps(CostKind.ALLREDUCE, v, 0.1 * allreduces)
        backward += steps(CostKind.COMPUTE, v, 0.5)
        backward += [CostTerm(CostKind.COMPUTE, (b, a), shuffles[a, b].T) for a, b in edges if b == v]
    memory = []
    for v in range(count):
        memory += steps(CostKind.RESIDENT, v, 0.8) + steps(CostKind.KEEP, v, 0.8) + steps(CostKind.TRANSIENT, v, 0.8)
        memory += [
            CostTerm(CostKind.TRANSIENT, edge, table(*edge)) for edge in edges if edge[1] == v and random.random() < 0.3
        ]
    for keep in [step for step in reversed(memory) if step.kind is CostKind.KEEP]:
        if random.random() < 0.4:
            memory += [
                CostTerm(CostKind.TRANSIENT, (), np.array(0.1)),
                CostTerm(CostKind.RELEASE, keep.variables, keep.table),
            ]
            memory += steps(CostKind.TRANSIENT, keep.variables[0], 0.5)
    if random.random() < 0.3:
        forward.append(CostTerm(CostKind.COMPUTE, (), np.array(0.25)))
        memory.append(CostTerm(CostKind.RESIDENT, (), np.array(0.25)))
    return AssignmentProblem(sizes, tuple(forward + backward), tuple(memory))


def is_close(left, right):
    return left == pytest.approx(right, rel=1e-9, abs=1e-12)
