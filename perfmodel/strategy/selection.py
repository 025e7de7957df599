"""``select``: the fastest plan that fits, with a proven bound.

It calls the search of ``method``, and compares the plan with pure sample and pure spatial parallelism. ``exact`` works
on cost tables alone, ``longest-path`` on the graph.

Source: Dryden et al. 2019, V-C for ``longest-path``; ``exact`` minimizes the same time that ``evaluate`` predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from distconv.errors import PlanError, UnsupportedOperation
from distconv.parameters.sharded_axes import parse_weight_axes, sharded_axes
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import Candidate, candidates
from distconv.perfmodel.cost.cost_tables import CostKind
from distconv.perfmodel.cost.evaluation import Prediction, StepModel, evaluate
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.longest_path import longest_path
from distconv.perfmodel.strategy.solver import Infeasible, Solution, smallest_memory, solve
from distconv.plan import Plan, format_parts

METHODS = ("exact", "longest-path")

AUTO = "auto"
"""Value of ``shard_weights`` that lets the search choose for each layer."""

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
    limit : float or None
        Memory limit in bytes per rank.
    weights : mapping of str to Prediction
        The same grids with ``"full"`` weights, and with all weights ``"sharded"`` over all axes. Empty on one rank.
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
    limit: float | None = None
    weights: Mapping[str, Prediction] = field(default_factory=dict)

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
    shard_weights: str | bool = False,
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
    shard_weights : str or bool
        Axes over which all layers shard their weights, as in :func:`parallelize`, or ``"auto"``: whether to shard over
        all axes is chosen for each layer, and the search must be ``exact``.
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
    UnsupportedOperation
        If ``shard_weights`` names an unknown axis.
    """
    if method not in METHODS:
        raise PlanError(f"select: method={method!r} is not valid. Use one of {', '.join(METHODS)}")
    if memory is not None and not memory > 0:
        raise PlanError(f"select: memory={memory!r} must be a positive number of bytes per rank, or None")
    if shard_weights == AUTO and method != "exact":
        raise PlanError(f"select: shard_weights={AUTO!r} needs method='exact', not {method!r}")
    options = _shardable(candidates(graph, ranks), ranks, shard_weights)
    model = StepModel.cached(graph, machine, ranks, Settings(**assumptions))
    search = _Search(model, options, (False, True) if shard_weights == AUTO else (shard_weights,))
    solution = (search.exact if method == "exact" else search.along_paths)(memory, seconds)
    chosen, sharding = search.strategy(solution.choices)
    parts = {name: dict(candidate) for name, candidate in chosen.items()}
    # A plan names the axes once if all layers shard over the same ones.
    same_axes = len(sharding) == len(parts) and len(set(sharding.values())) == 1
    shard_by_layer = next(iter(sharding.values())) if same_axes else sharding
    plan = Plan(parts, ranks, batch_norm=model.costs.settings.batch_norm, shard_weights=shard_by_layer)
    return Strategy(
        plan=plan,
        time=solution.time,
        memory=solution.memory,
        bound=solution.bound,
        gap=solution.gap,
        optimal=solution.optimal,
        prediction=evaluate(graph, plan, machine, ranks, **assumptions),
        uniform={
            name: None if pure is None else evaluate(graph, {"*": pure}, machine, ranks, **assumptions)
            for name, pure in pure_parallelism(graph, ranks).items()
        },
        impossible=_impossible_parallelism(graph, ranks),
        method=method,
        estimated=model.is_estimated(chosen),
        limit=memory,
        weights={
            name: evaluate(graph, parts, machine, ranks, shard_weights=sharded, **assumptions)
            for name, sharded in {"full": False, "sharded": True}.items()
            if ranks > 1
        },
    )


def _shardable(
    options: Mapping[str, list[dict[str, int]]], ranks: int, shard_weights: str | bool
) -> dict[str, list[dict[str, int]]]:
    """Return the candidates whose weights can be sharded over the axes ``shard_weights``."""
    if isinstance(shard_weights, bool) or shard_weights == AUTO:
        return dict(options)

    def is_shardable(candidate: Candidate) -> bool:
        try:
            sharded_axes(AxisParts.from_axes(candidate, ranks, 1), shard_weights)
        except UnsupportedOperation:
            return False
        return True

    parse_weight_axes(shard_weights, "select: shard_weights")
    kept = {name: [each for each in layer if is_shardable(each)] for name, layer in options.items()}
    without = [name for name, layer in kept.items() if not layer]
    if without:
        raise PlanError(
            f"select: shard_weights={shard_weights!r}: each candidate of {without[0]!r} has another axis between these "
            "axes in the order of the ranks; use True or one axis"
        )
    return kept


class _Search:
    """Search for the best choices.

    Parameters
    ----------
    model : StepModel
    options : mapping of str to sequence
        Candidates of each deciding layer.
    sharding : sequence of str or bool
        Axes over which each deciding layer may shard its weights.
    """

    def __init__(
        self, model: StepModel, options: Mapping[str, Sequence[Candidate]], sharding: Sequence[str | bool]
    ) -> None:
        self._model, self._options, self._sharding = model, options, sharding

    def exact(self, memory: float | None, seconds: float) -> Solution:
        """Return the best solution found; it is not slower than that of the paper's method."""
        # Without the limit first: there are fewer sums, and the result may be small enough.
        problem = self._model.problem(self._options, self._sharding)
        starts = self._paths(0.0)
        solution = solve(problem, None, starts, seconds)
        if memory is None or solution.memory <= memory:
            return solution
        starts += [path for weight in MEMORY_WEIGHTS for path in self._paths(weight)]
        try:
            return solve(problem, memory, starts, seconds)
        except Infeasible as error:
            raise self._no_fit_error(memory, error.choices, error.smallest) from None

    def along_paths(self, memory: float | None, seconds: float) -> Solution:
        """Return the paper's choice, with a penalty on memory if it does not fit otherwise. Nothing is proven."""
        for weight in (0.0, *MEMORY_WEIGHTS):
            (path,) = self._paths(weight)
            time, size = self._model.predict(*self.strategy(path))
            if memory is None or size <= memory:
                return Solution(tuple(path), time, size, 0.0, False)
        assert memory is not None
        smallest = smallest_memory(self._model.problem(self._options, self._sharding), [path], seconds)
        raise self._no_fit_error(memory, smallest.choices, smallest.memory)

    def strategy(self, choices: Sequence[int]) -> tuple[dict[str, Candidate], dict[str, str | bool]]:
        """Return the candidate of each layer, and the axes over which layers shard their weights."""
        layers = len(self._options)
        chosen = {name: each[i] for (name, each), i in zip(self._options.items(), choices[:layers], strict=True)}
        axes = [self._sharding[i] for i in choices[layers:]] or [self._sharding[0]] * layers
        return chosen, {name: each for name, each in zip(self._options, axes, strict=True) if each}

    def _paths(self, memory_weight: float) -> list[list[int]]:
        """Return the paper's choice of grids, once for each element of ``sharding``, which all layers then have."""
        several = len(self._sharding) > 1
        paths = []
        for index, sharded in enumerate(self._sharding):
            path = longest_path(self._model, self._options, memory_weight, sharded)
            paths.append([path[name] for name in self._options] + [index] * len(self._options) * several)
        return paths

    def _no_fit_error(self, memory: float, choices: Sequence[int], smallest: float) -> PlanError:
        """Return the error that no plan fits, with the layer that holds the most in the smallest plan."""
        chosen, sharding = self.strategy(choices)
        decisions = self._model.decisions(chosen, sharding)
        held: dict[str, float] = dict.fromkeys(chosen, 0.0)
        # Bytes that depend on two layers, such as a redistributed input, count for the layer that reads them.
        for term in self._model.memory:
            layers = [name for name in term.decisions if name in held]
            if layers and term.kind in (CostKind.RESIDENT, CostKind.KEEP):
                held[layers[-1]] += term.cost(*[decisions[name] for name in term.decisions])
        tightest = max(held, key=lambda name: held[name])
        full = "" if sharding else ", or shard the weights (shard_weights='auto')"
        return PlanError(
            f"select: no plan of {self._model.graph.model} on {self._model.ranks} ranks fits into {memory / 1e9:.4g} "
            f"GB per rank; the smallest limit that works is {smallest:.0f} bytes ({smallest / 1e9:.4g} GB), the "
            f"tightest layer {tightest!r} ({format_parts(chosen[tightest])}) with {held[tightest] / 1e9:.4g} GB; use "
            f"more ranks, smaller samples or fewer of them{full}"
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
    sharded = strategy.plan.shard_weights
    if sharded:
        some = f"{len(sharded)} of {len(prediction.layers)} layers: {', '.join(sharded)}"
        yield f"  weights are sharded in {'all layers' if list(sharded) == ['*'] else some}"

    def gigabytes(memory: float) -> str:
        fits = strategy.limit is None or memory <= strategy.limit
        return f"{memory / 1e9:.3f} GB{'' if fits else ' (does not fit)'}"

    if strategy.weights:
        of = (f"{each.time * 1e3:.3f} ms, {gigabytes(each.memory)}" for each in strategy.weights.values())
        yield "  this plan with full weights: {}; with all weights sharded: {}".format(*of)
    for name, alone in strategy.uniform.items():
        if alone is None:
            yield f"  pure {name} parallelism: not possible, {strategy.impossible[name]}"
        else:
            ratio = alone.time / strategy.time
            yield f"  pure {name} parallelism: {alone.time * 1e3:.3f} ms ({ratio:.3f} x), {gigabytes(alone.memory)}"
    columns = {"FP": "fp", "BPx": "bpx", "BPw": "bpw", "BPa": "bpa", "halo": "halo", "shuffle": "shuffle"}
    columns |= {"gather": "gather"} if sharded else {}
    heads = " ".join(f"{head:>8}" for head in columns)
    yield f"  {'layers':<44} {'distribution':<18} {heads}  ms"
    for parts, group in groupby(prediction.layers.items(), key=lambda item: format_parts(item[1].parts)):
        layers = list(group)
        names = layers[0][0] if len(layers) == 1 else f"{layers[0][0]} ... {layers[-1][0]} ({len(layers)})"
        figures = [sum(getattr(layer, figure) for _, layer in layers) for figure in columns.values()]
        yield f"  {names:<44} {parts:<18} " + " ".join(f"{1e3 * figure:8.3f}" for figure in figures)
    if prediction.unknown:
        yield f"  estimated by the memory that they touch (see register_cost): {', '.join(prediction.unknown)}"
