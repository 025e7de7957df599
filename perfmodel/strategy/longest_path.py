"""Strategy selection of the paper: shortest paths through candidates, along one path of layers after another.

:func:`.select` calls it for ``method="longest-path"``, and as a starting point of the exact search.

Source: Dryden et al. 2019, V-C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np

from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import Candidate
from distconv.perfmodel.cost.evaluation import StepModel
from distconv.perfmodel.cost.operation_work import local_call, work
from distconv.perfmodel.cost.step_memory import sharding_of
from distconv.perfmodel.graph.graph import INPUT, LayerGraph


def longest_path(
    model: StepModel,
    candidates: Mapping[str, Sequence[Candidate]],
    memory_weight: float = 0.0,
    sharded: str | bool = False,
) -> dict[str, int]:
    """Choose a candidate for each layer, along the longest paths first.

    The length of a path is the number of its layers that have no distribution yet; ties go to more FLOPs. Layers that
    have a distribution keep it.

    Source: Dryden et al. 2019, V-C.

    Parameters
    ----------
    model : StepModel
    candidates : mapping of str to sequence
        Candidates of each deciding layer.
    memory_weight : float
        Penalty on memory, seconds per byte.
    sharded : str or bool
        Axes over which all layers shard their weights.

    Returns
    -------
    dict of str to int
        Index of each layer's candidate.
    """
    chosen: dict[str, int] = {}
    costs = {
        name: _layer_costs(model, name, options_of, memory_weight, sharded) for name, options_of in candidates.items()
    }
    for path in _paths(model.graph):
        options = {name: [chosen[name]] if name in chosen else list(range(len(candidates[name]))) for name in path}
        chosen.update(_shortest(model, candidates, costs, path, options))
    return chosen


def _paths(graph: LayerGraph) -> Iterator[list[str]]:
    """Yield paths of deciding layers until each layer has been on one."""
    # Of each operation's forward pass on one rank.
    alone = AxisParts(1, 1)
    flops = {op.index: work(local_call(op, alone), "forward").flops for op in graph.operations}
    heaviest = 1.0 + sum(flops.values())
    waiting = set(graph.deciding)
    while waiting:
        longest: dict[int, tuple[float, list[str]]] = {INPUT: (0.0, [])}
        for op in graph.operations:  # each after those that it reads
            new = op.decides and op.layer in waiting
            # A new layer counts 1 and a little more for its FLOPs. A layer that has a distribution counts slightly less
            # than nothing, so that a path contains such layers between new ones and at most one in front of them.
            own = 1.0 + flops[op.index] / heaviest if new else -1e-6 if op.decides else 0.0
            length, layers = max((longest[value.producer] for value in op.inputs), key=itemgetter(0), default=(0.0, []))
            if length + own < 0.0:  # a path may begin here as well
                length, layers = -own, []
            longest[op.index] = (length + own, [*layers, op.layer] if op.decides else layers)
        path = list(dict.fromkeys(max(longest.values(), key=itemgetter(0))[1]))
        yield path
        waiting -= set(path)


def _layer_costs(
    model: StepModel, name: str, options: Sequence[Candidate], memory_weight: float, sharded: str | bool
) -> np.ndarray:
    """Return the cost of each candidate of a layer (Cost_D in the paper), including operations that inherit its grid.

    The gradient all-reduce, and gathers of sharded weights, count in full, without overlap.
    """
    total = np.zeros(len(options))
    for op in model.graph.operations:
        if op.layer == name:
            for index, candidate in enumerate(options):
                cost = model.costs.operation(op, model.parts(candidate), op.decides and sharded)
                total[index] += cost.update + cost.forward + cost.backward + cost.bpa + 2 * cost.gather
    if memory_weight:
        for term in model.memory:
            if set(term.decisions) <= {name, sharding_of(name)} and term.decisions:
                chosen = [model.decisions({name: candidate}, {name: sharded}) for candidate in options]
                total += memory_weight * np.array(
                    [term.cost(*[each[key] for key in term.decisions]) for each in chosen]
                )
    return total


def _shortest(
    model: StepModel,
    candidates: Mapping[str, Sequence[Candidate]],
    costs: Mapping[str, np.ndarray],
    path: list[str],
    options: Mapping[str, list[int]],
) -> dict[str, int]:
    """Return the shortest path through the options of each layer; edges cost the redistribution between layers."""
    shuffles = [term for term in model.time if len(term.decisions) == 2 and term.decisions in set(pairwise(path))]
    best = costs[path[0]][options[path[0]]]
    back: list[np.ndarray] = []
    for before, here in pairwise(path):
        edges = np.zeros((len(options[before]), len(options[here])))
        # Forward and backward redistributions have the same pair of layers, so both are edges here.
        for term in shuffles:
            if term.decisions == (before, here):
                sources = [model.parts(candidates[before][i]) for i in options[before]]
                targets = [model.parts(candidates[here][j]) for j in options[here]]
                edges += [[term.cost(source, target) for target in targets] for source in sources]
        through = best[:, None] + edges
        back.append(through.argmin(axis=0))
        best = through.min(axis=0) + costs[here][options[here]]
    # Back along the path from the cheapest candidate of the last layer.
    index = int(best.argmin())
    chosen = {path[-1]: options[path[-1]][index]}
    for name, pointers in zip(reversed(path[:-1]), reversed(back), strict=True):
        index = int(pointers[index])
        chosen[name] = options[name][index]
    return chosen
