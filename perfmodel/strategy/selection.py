"""``select``: the fastest plan that fits, with a proven bound.

It calls the search of ``method``, and compares the plan with pure sample and pure spatial parallelism. ``exact`` works
on cost tables alone, ``longest-path`` on the graph.

Source: Dryden et al. 2019, V-C for ``longest-path``; ``exact`` minimizes the same time that ``evaluate`` predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from distconv.errors import PlanError
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.candidates import Candidate, candidates
from distconv.perfmodel.cost.cost_tables import CostKind
from distconv.perfmodel.cost.evaluation import Prediction, StepModel, evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.longest_path import longest_path
from distconv.perfmodel.strategy.solver import Infeasible, Solution, smallest_memory, solve
from distconv.plan import Plan, format_parts

METHODS = ("exact", "longest-path")

MEMORY_WEIGHTS = tuple(10.0**exponent for exponent in range(-15, -5))
"""Seconds per byte by which ``longest-path`` penalizes memory, in increasing order until the limit is met.

With a limit, ``exact`` starts from the results for all of them.
"""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Plan found by :func:`select`, and its prediction.

    Attributes
    ----------
    plan : Plan
        Distribution of each deciding layer.
    time : float
        Predicted seconds per step.
    memory : float
        Predicted peak bytes on the rank with the most memory.
    bound : float
        Lower bound in seconds: no plan over the same candidates is faster. 0 if nothing is proven.
    gap : float
        ``time / bound - 1``; infinite if nothing is proven.
    optimal : bool
        True if no plan over the same candidates is faster, which is proven up to rounding. Otherwise unknown.
    prediction : Prediction
        Times of each layer.
    uniform : mapping of str to Prediction or None
        Pure ``"sample"`` and pure ``"spatial"`` parallelism; None where it is impossible.
    impossible : mapping of str to str
        Reason why pure parallelism is impossible.
    method : {"exact", "longest-path"}
        Search that found the plan.
    estimated : bool
        True if the machine has measured times, but not of all layers with weights under this plan. Otherwise it has all
        of them, or none.
    """

    plan: Plan
    time: float
    memory: float
    bound: float
    gap: float
    optimal: bool
    prediction: Prediction
    uniform: Mapping[str, Prediction | None]
    impossible: Mapping[str, str]
    method: str
    estimated: bool = False

    def explain(self) -> str:
        """Return a table of the layers with their distributions and times, and the time of pure parallelism.

        Returns
        -------
        str
            Several lines; times in milliseconds, memory in GB.
        """
        return "\n".join(_format_strategy(self))


def select(
    graph: LayerGraph,
    machine: Machine,
    ranks: int,
    memory: float | None = None,
    method: str = "exact",
    *,
    seconds: float = 20.0,
    **assumptions: Any,
) -> Strategy:
    """Choose each layer's distribution for the least time per step within a memory limit.

    Source: Dryden et al. 2019, V-C (``longest-path``).

    Parameters
    ----------
    graph : LayerGraph
        Network, from :func:`trace`.
    machine : Machine
        Hardware model.
    ranks : int
        Number of ranks.
    memory : float, optional
        Limit in bytes per rank. Default: none.
    method : {"exact", "longest-path"}
        Search with a proven bound, or the search of the paper, which proves nothing.
    seconds : float
        Approximate time limit of the ``exact`` search. If it ends earlier than the proof, ``gap`` bounds the loss.
    **assumptions
        Fields of :class:`Settings`, as in :func:`evaluate`.

    Returns
    -------
    Strategy
        The plan with its prediction.

    Raises
    ------
    PlanError
        If an argument is invalid, or no plan fits into ``memory``. The message then names the layer that holds the
        most, and the smallest limit that works.
    SettingsError
        If an assumption is invalid.
    """
    if method not in METHODS:
        raise PlanError(f"select: method={method!r} is not valid. Use one of {', '.join(METHODS)}")
    if memory is not None and not memory > 0:
        raise PlanError(f"select: memory={memory!r} must be a positive number of bytes per rank, or None")
    options = candidates(graph, ranks)
    model = StepModel.cached(graph, machine, ranks, Settings(**assumptions))
    solution = (_solve_exactly if method == "exact" else _solve_along_paths)(model, options, memory, seconds)
    chosen = {name: options[name][i] for name, i in zip(options, solution.choices, strict=True)}
    parts = {name: dict(candidate) for name, candidate in chosen.items()}
    return Strategy(
        plan=Plan(parts, ranks, batch_norm=model.costs.settings.batch_norm),
        time=solution.time,
        memory=solution.memory,
        bound=solution.bound,
        gap=solution.gap,
        optimal=solution.optimal,
        prediction=evaluate(graph, parts, machine, ranks, **assumptions),
        uniform={
            name: None if pure is None else evaluate(graph, {"*": pure}, machine, ranks, **assumptions)
            for name, pure in pure_parallelism(graph, ranks).items()
        },
        impossible=_impossible_parallelism(graph, ranks),
        method=method,
        estimated=model.is_estimated(chosen),
    )


def _solve_exactly(
    model: StepModel, options: Mapping[str, Sequence[Candidate]], memory: float | None, seconds: float
) -> Solution:
    """Return the best solution found; it is not slower than that of the paper's method."""
    # Without the limit first: there are fewer sums, and the result may be small enough.
    problem = model.problem(options)
    start = _path(model, options, 0.0)
    solution = solve(problem, None, [start], seconds)
    if memory is None or solution.memory <= memory:
        return solution
    starts = [start, *(_path(model, options, weight) for weight in MEMORY_WEIGHTS)]
    try:
        return solve(problem, memory, starts, seconds)
    except Infeasible as error:
        raise _no_fit_error(model, options, memory, error.choices, error.smallest) from None


def _solve_along_paths(
    model: StepModel, options: Mapping[str, Sequence[Candidate]], memory: float | None, seconds: float
) -> Solution:
    """Return the paper's choice, with a penalty on memory if it does not fit otherwise. Nothing is proven."""
    for weight in (0.0, *MEMORY_WEIGHTS):
        path = _path(model, options, weight)
        time, size = model.predict({name: options[name][i] for name, i in zip(options, path, strict=True)})
        if memory is None or size <= memory:
            return Solution(tuple(path), time, size, 0.0, False)
    assert memory is not None
    smallest = smallest_memory(model.problem(options), [path], seconds)
    raise _no_fit_error(model, options, memory, smallest.choices, smallest.memory)


def _path(model: StepModel, options: Mapping[str, Sequence[Candidate]], memory_weight: float) -> list[int]:
    path = longest_path(model, options, memory_weight)
    return [path[name] for name in options]


def _no_fit_error(
    model: StepModel, options: Mapping[str, Sequence[Candidate]], memory: float, choices: Sequence[int], smallest: float
) -> PlanError:
    """Return the error that no plan fits, with the layer that holds the most in the smallest plan."""
    chosen = {name: options[name][i] for name, i in zip(options, choices, strict=True)}
    held: dict[str, float] = dict.fromkeys(options, 0.0)
    # Bytes that depend on two layers, such as a redistributed input, count for the layer that reads them.
    for term in model.memory:
        if term.layers and term.kind in (CostKind.RESIDENT, CostKind.KEEP):
            held[term.layers[-1]] += term.cost(*[model.parts(chosen[name]) for name in term.layers])
    tightest = max(held, key=lambda name: held[name])
    return PlanError(
        f"select: no plan of {model.graph.model} on {model.ranks} ranks fits into {memory / 1e9:.4g} GB per rank; the "
        f"smallest limit that works is {smallest:.0f} bytes ({smallest / 1e9:.4g} GB), the tightest layer "
        f"{tightest!r} ({format_parts(chosen[tightest])}) with {held[tightest] / 1e9:.4g} GB; use more ranks, smaller "
        "samples or fewer of them"
    )


def pure_parallelism(graph: LayerGraph, ranks: int) -> dict[str, dict[str, int] | None]:
    """Return pure sample and pure spatial parallelism of all layers.

    Parameters
    ----------
    graph : LayerGraph
    ranks : int
        Number of ranks.

    Returns
    -------
    dict of str to dict or None
        Parts of ``"sample"`` and ``"spatial"``; None where the shapes do not allow it.
    """
    first = graph.by_layer[graph.input_layer][0]
    sample = {"n": ranks} if graph.batch >= ranks else None
    options = [parts for parts in candidates(graph, ranks)[first.layer] if set(parts) <= {"d", "h", "w"}]
    if ranks > 1:  # a candidate that splits nothing is no parallelism
        options = [parts for parts in options if parts]
    return {"sample": sample, "spatial": options[0] if options else None}


def _impossible_parallelism(graph: LayerGraph, ranks: int) -> dict[str, str]:
    extents = " x ".join(map(str, graph.by_layer[graph.input_layer][0].x.shape[2:]))
    why = {
        "sample": f"{graph.batch} samples for {ranks} ranks",
        "spatial": f"no even cut of the input's {extents or 'single element'} over {ranks} ranks",
    }
    return {name: why[name] for name, parts in pure_parallelism(graph, ranks).items() if parts is None}


def _format_strategy(strategy: Strategy) -> Iterator[str]:
    prediction = strategy.prediction
    proven = "proven the best" if strategy.optimal else f"at most {strategy.gap:.2%} above the best possible"
    if strategy.bound <= 0:
        proven = "nothing proven"
    yield (
        f"{strategy.time * 1e3:.3f} ms per step ({strategy.method}: {proven}), {strategy.memory / 1e9:.3f} GB per rank,"
        f" {prediction.hidden * 1e3:.3f} ms of communication hidden"
    )
    for name, alone in strategy.uniform.items():
        if alone is None:
            yield f"  pure {name} parallelism: not possible, {strategy.impossible[name]}"
        else:
            ratio = alone.time / strategy.time
            yield f"  pure {name} parallelism: {alone.time * 1e3:.3f} ms ({ratio:.3f} x), {alone.memory / 1e9:.3f} GB"
    heads = " ".join(f"{head:>8}" for head in ("FP", "BPx", "BPw", "BPa", "halo", "shuffle"))
    yield f"  {'layers':<44} {'distribution':<18} {heads}  ms"
    for parts, group in groupby(prediction.layers.items(), key=lambda item: format_parts(item[1].parts)):
        layers = list(group)
        names = layers[0][0] if len(layers) == 1 else f"{layers[0][0]} ... {layers[-1][0]} ({len(layers)})"
        figures = [sum(getattr(p, f) for _, p in layers) for f in ("fp", "bpx", "bpw", "bpa", "halo", "shuffle")]
        yield f"  {names:<44} {parts:<18} " + " ".join(f"{1e3 * figure:8.3f}" for figure in figures)
    if prediction.unknown:
        yield f"  estimated by the memory that they touch (see register_cost): {', '.join(prediction.unknown)}"
