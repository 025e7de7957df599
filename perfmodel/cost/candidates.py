"""Candidate distributions of each deciding layer, and the distribution that a plan gives it.

:func:`.select` searches among the candidates; :func:`.evaluate` resolves a plan. Times are computed elsewhere.

Source: Dryden et al. 2019, V-C (candidate distributions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from distconv.errors import PlanError
from distconv.parameters.channel_split import divisors
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of
from distconv.perfmodel.cost.operation_cost import SPATIAL
from distconv.perfmodel.cost.operation_work import axes_in, is_divisible, local_call, work
from distconv.perfmodel.graph.graph import LayerGraph, Operation
from distconv.plan import Plan, check_axes, check_parts, check_product, match_patterns

Candidate = Mapping[str, int]

MIN_CANDIDATES = 3
"""With fewer candidates that use all ranks, candidates that use fewer ranks and hold replicas are added."""

MAX_CANDIDATES = 32
"""Maximum number of candidates per layer. The time of a search grows with its square."""

MAX_IMBALANCE = 4.0
"""Candidates whose heuristic cost exceeds this multiple of the least one are dropped, except pure parallelism."""


def resolve(graph: LayerGraph, plan: Plan | Mapping[str, Candidate], ranks: int) -> dict[str, dict[str, int]]:
    """Return the parts along each axis of every deciding layer.

    A deciding layer that the plan does not name has the grid of the layer that made its input.

    Parameters
    ----------
    graph : LayerGraph
    plan : Plan or mapping of str to mapping
        Parts by layer name or pattern.
    ranks : int
        Number of ranks.

    Returns
    -------
    dict of str to dict
        Parts by axis, for each deciding layer in the order of the graph.

    Raises
    ------
    PlanError
        If the plan is for another number of ranks, a pattern matches no layer, the first layer has no distribution, or
        a distribution does not fit its layer or ``ranks``.
    """
    if isinstance(plan, Plan) and plan.ranks not in (None, ranks):
        raise PlanError(f"plan: made for {plan.ranks} ranks, not for {ranks}; plan for {ranks} ranks")
    given = plan.layers if isinstance(plan, Plan) else plan
    named = match_patterns(given, graph.by_layer, graph.deciding, graph.model)
    resolved: dict[str, dict[str, int]] = {}
    for name in graph.deciding:
        op = graph.by_layer[name][0]
        parts = named.get(name, resolved.get(graph.layer_of(op.x)))
        if parts is None:
            raise PlanError(f"plan: {name!r}, where the input arrives, has no distribution; name it, or use '*'")
        # Each check is made once for a graph: plans are resolved many times, with few distributions of each layer.
        key = ("checked", op.index, tuple(parts.items()), ranks)
        if key not in graph.caches:
            _check(op, parts, ranks)
            graph.caches[key] = dict(parts)
        resolved[name] = graph.caches[key]
    return resolved


def resolve_sharding(
    graph: LayerGraph, plan: Plan | Mapping[str, Candidate], shard_weights: str | bool | None
) -> dict[str, str | bool]:
    """Return the axes over which deciding layers shard their weights.

    Parameters
    ----------
    graph : LayerGraph
    plan : Plan or mapping
        As in :func:`resolve`.
    shard_weights : str, bool or None
        Axes for all layers; None for those of a Plan.

    Returns
    -------
    dict of str to str or bool
        Axes of each layer that shards its weights.
    """
    if shard_weights is not None:
        return dict.fromkeys(graph.deciding, shard_weights)
    patterns = plan.shard_weights if isinstance(plan, Plan) else {}
    return match_patterns(patterns, graph.by_layer, graph.deciding, graph.model, "plan: shard_weights")


def _check(op: Operation, parts: Candidate, ranks: int) -> None:
    check_parts(op.layer, parts)
    check_product(op.layer, parts, ranks)
    if op.kind != "linear":
        check_axes(op.layer, op.kind, len(op.x.shape) - 2, parts)
    channels = parts.get("c", 1)
    if channels > 1 and not is_divisible(op, channels):
        raise PlanError(
            f"plan: {op.layer!r}: C={op.x.shape[1]} channels, F={op.y.shape[1]} filters and groups={op.groups} do not "
            f"divide over c={channels}; use fewer ranks along c"
        )


def candidates(graph: LayerGraph, ranks: int) -> dict[str, list[dict[str, int]]]:
    """Return the distributions that each deciding layer may have, those with the smallest heuristic cost first.

    No candidate leaves a rank without work. Pure sample and pure spatial parallelism are among the candidates where
    they exist. Candidates with fewer parts than ``ranks`` leave replicas. They appear only where fewer than
    ``MIN_CANDIDATES`` others exist.

    Source: Dryden et al. 2019, V-C.

    Parameters
    ----------
    graph : LayerGraph
    ranks : int
        Number of ranks.

    Returns
    -------
    dict of str to list of dict
        Parts by axis of each candidate, for each deciding layer.

    Raises
    ------
    PlanError
        If ``ranks`` is not a positive integer.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise PlanError(f"candidates: ranks={ranks!r} must be a positive whole number")
    shared: dict[tuple[object, ...], list[dict[str, int]]] = {}
    options = {}
    for name in graph.deciding:
        calls = graph.by_layer[name]
        # Layers of the same shapes, as in the blocks of a ResNet, share their candidates.
        key = tuple((op.kind, op.x.shape, op.y.shape, op.groups, op.window) for op in calls)
        if key not in shared:
            shared[key] = _layer_candidates(calls, ranks)
        options[name] = [dict(candidate) for candidate in shared[key]]
    return options


def _layer_candidates(calls: tuple[Operation, ...], ranks: int) -> list[dict[str, int]]:
    """Return the candidates of a layer that use all of ``ranks``, or as many as possible."""
    limits = tuple(_max_parts(calls).items())
    options: list[dict[str, int]] = []
    # All ranks first. With few possibilities, plans that leave ranks as replicas are added. Channels must divide in
    # each call of the layer.
    for used in reversed(divisors(ranks)):
        options += [
            parts
            for parts in _factorizations(used, limits)
            if "c" not in parts or all(is_divisible(op, parts["c"]) for op in calls)
        ]
        if len(options) >= MIN_CANDIDATES:
            break
    burdens = {_sort_key(parts): _heuristic_cost(calls, parts, ranks) for parts in options}
    options.sort(key=lambda parts: burdens[_sort_key(parts)])
    # At least {} is left, for which all ranks hold replicas.
    least = burdens[_sort_key(options[0])]
    kept = [p for p in options if burdens[_sort_key(p)] <= MAX_IMBALANCE * least or len(options) <= MIN_CANDIDATES]
    # Pure parallelism stays whatever its cost, because reports compare plans with it.
    pure = [parts for parts in options if _is_pure(parts, ranks)]
    wanted = [*pure, *(parts for parts in kept if parts not in pure)][: max(MAX_CANDIDATES, len(pure))]
    # In the order of their costs, so that the first candidate is a good start of a search.
    return [parts for parts in options if parts in wanted]


def _sort_key(parts: Candidate) -> tuple[tuple[str, int], ...]:
    return tuple(parts.items())


def _max_parts(calls: tuple[Operation, ...]) -> dict[str, int]:
    """Return the most parts along each axis that leave no rank without work in any call of a layer."""
    limits: dict[str, int] = {}
    for op in calls:
        for axis, extent, out_extent in zip(axes_in(op, op.x), op.x.shape, op.y.shape, strict=True):
            if axis:
                # More parts than indices would leave ranks without a block in every step.
                limits[axis] = min(extent, out_extent, limits.get(axis, extent))
    return limits


def _factorizations(product: int, limits: tuple[tuple[str, int], ...]) -> Iterator[dict[str, int]]:
    """Yield all ways to write ``product`` as parts along axes, none above its limit."""
    if not limits:
        if product == 1:
            yield {}
        return
    (axis, most), *others = limits
    for parts in divisors(product):
        if parts <= most:
            for rest in _factorizations(product // parts, tuple(others)):
                yield {axis: parts, **rest} if parts > 1 else rest


def _is_pure(parts: Candidate, ranks: int) -> bool:
    """Return True if ``parts`` are sample parallelism alone or spatial parallelism alone, over all ranks."""
    return math.prod(parts.values()) == ranks and (set(parts) <= {"n"} or set(parts) <= {"d", "h", "w"})


def _heuristic_cost(calls: tuple[Operation, ...], parts: Candidate, ranks: int) -> float:
    """Return a heuristic cost: FLOPs of the slowest rank, plus a surcharge for halos and for each split of channels.

    Splitting samples has no surcharge, since it needs nothing but the gradient all-reduce (V-A).
    """
    # No machine is given, so each rank counts as a node.
    grid = AxisParts.from_axes(parts, ranks, 1)
    flops = sum(work(local_call(op, grid), "forward").flops for op in calls)
    op = calls[0]
    reach = max(op.window.kernel) - 1 if op.window else 0
    split = zip(axes_of(op.x.shape), op.x.shape, strict=True)
    surface = sum(
        reach * grid.parts_along(axis) / extent
        for axis, extent in split
        if axis in SPATIAL and grid.parts_along(axis) > 1
    )
    # Only an order: work of the critical rank, increased by its halo relative to the block and by steps of
    # collectives over c.
    return flops * (1 + surface + math.log2(grid.parts_along("c")) / 4)
