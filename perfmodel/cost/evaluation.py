"""``evaluate``: time and memory of a training step under a plan.

Order of the modelled step::

    [1] update    [2] forward: redistributions and FP of each operation in turn
    [3] backward, from the last operation to the first: its reductions, BPx and BPw, then the gradient all-reduce is
      queued, then the activation gradients are redistributed; all-reduces run one at a time, overlapped with the rest
    sharded weights are gathered one operation ahead in [2] and [3]; gathers run like all-reduces

Source: Dryden et al. 2019, V-A and V-B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, zip_longest
from typing import Any

import numpy as np

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import Candidate, resolve, resolve_sharding
from distconv.perfmodel.cost.cost_tables import AssignmentProblem, CostKind, CostTerm, Term, makespan, peak
from distconv.perfmodel.cost.operation_cost import OperationCosts
from distconv.perfmodel.cost.operation_work import registered_costs, unknown_functions
from distconv.perfmodel.cost.step_memory import decisions_on_weights, lasting_bytes, memory_terms, sharding_of
from distconv.perfmodel.graph.graph import LayerGraph, Operation
from distconv.perfmodel.machine.machine import Machine
from distconv.plan import Plan

Assignment = Mapping[str, Candidate]
"""Distribution of each deciding layer, by its name; also called a strategy."""


@dataclass(frozen=True)
class LayerPrediction:
    """Seconds per step of a deciding layer and of the operations that inherit its distribution, before any overlap.

    Source: Dryden et al. 2019, V-A (FP, BPx, BPw, BPa) and V-B (redistribution).

    Attributes
    ----------
    parts : dict
        Number of parts along each grid axis.
    fp : float
        Forward computation.
    bpx : float
        Backward-data computation.
    bpw : float
        Backward-weights computation.
    bpa : float
        Gradient all-reduce.
    halo : float
        Exchanges of halos and channels, forward and backward.
    sync : float
        Reductions that the computation waits for, such as those of batch norm.
    shuffle : float
        Redistribution of inputs and of their gradients.
    update : float
        Optimizer.
    gather : float
        Gathers of sharded weights, forward and backward.
    """

    parts: dict[str, int]
    fp: float
    bpx: float
    bpw: float
    bpa: float
    halo: float
    sync: float
    shuffle: float
    update: float
    gather: float

    @property
    def spent(self) -> float:
        """Sum of all times in seconds."""
        return math.fsum(getattr(self, figure) for figure in _TIME_FIELDS)


_TIME_FIELDS = ("fp", "bpx", "bpw", "bpa", "halo", "sync", "shuffle", "update", "gather")


@dataclass(frozen=True)
class Prediction:
    """Predicted training step under a plan.

    Attributes
    ----------
    time : float
        Seconds per step.
    memory : float
        Peak bytes on the rank with the most memory.
    layers : dict of LayerPrediction
        Times of each deciding layer, before overlap.
    hidden : float
        Seconds of communication that overlap with computation.
    lasting : float
        Bytes of ``memory`` that stay allocated between steps: parameters and optimizer state.
    unknown : tuple of str
        Functions that the model estimates by the memory that they touch; see :func:`register_cost`.
    """

    time: float
    memory: float
    layers: dict[str, LayerPrediction]
    hidden: float
    lasting: float
    unknown: tuple[str, ...] = field(default=())


class StepModel:
    """Cost of a graph on the ranks of a machine, as terms in the order in which a training step executes them.

    Use :meth:`cached`, which caches the model with the graph. Terms depend on grids, not on a plan, so one model serves
    all plans.

    Attributes
    ----------
    graph : LayerGraph
    ranks : int
    costs : OperationCosts
    per_node : int
        Ranks per node.
    time : tuple of Term
        COMPUTE and ALLREDUCE terms in seconds.
    """

    def __init__(self, graph: LayerGraph, machine: Machine, ranks: int, settings: Settings) -> None:
        self.graph = graph
        self.ranks = ranks
        self.costs = OperationCosts(machine, ranks, settings)
        self.per_node = machine.ranks_per_node
        self.time = tuple(self._time_terms())

    @cached_property
    def memory(self) -> tuple[Term, ...]:
        """Terms in bytes, in the order of the forward pass."""
        return tuple(memory_terms(self.graph, self.costs))

    @classmethod
    def cached(cls, graph: LayerGraph, machine: Machine, ranks: int, settings: Settings) -> StepModel:
        """Return the model of these arguments, cached in ``graph.caches``.

        The registered costs are part of the key, because :func:`register_cost` changes the terms.

        Parameters
        ----------
        graph, machine, ranks, settings
            As in the class.

        Returns
        -------
        StepModel
        """
        # register_cost changes the costs of an existing graph, so it is part of the key.
        key = (machine, ranks, settings, registered_costs())
        if key not in graph.caches:
            graph.caches[key] = cls(graph, machine, ranks, settings)
        model: StepModel = graph.caches[key]
        return model

    def is_estimated(self, strategy: Mapping[str, Candidate]) -> bool:
        """Return True if the machine has measured times, but not of all layers with weights under ``strategy``.

        A roofline often gives less than half of a measured time. An estimate must therefore not be ranked against a
        prediction from measured times.
        """
        operations = (op for op in self.graph.operations if not op.view)
        return any(self.costs.is_estimated(op, self.parts(strategy[op.layer])) for op in operations)

    def parts(self, candidate: Candidate) -> AxisParts:
        """Return the grid of a candidate."""
        return AxisParts.from_axes(candidate, self.ranks, self.per_node)

    def _time_terms(self) -> Iterator[Term]:
        costs, graph = self.costs, self.graph
        # Without overlap an all-reduce occupies the rank like computation.
        overlapped = CostKind.ALLREDUCE if costs.overlap_allreduce else CostKind.COMPUTE

        def computing(op: Operation, what: str) -> Term:
            return Term(CostKind.COMPUTE, (op.layer,), lambda parts: getattr(costs.operation(op, parts), what))

        def of_weights(kind: CostKind, op: Operation, what: str) -> Iterator[Term]:
            def cost(parts: AxisParts, sharded: str | bool = False) -> float:
                seconds: float = getattr(costs.operation(op, parts, sharded), what)
                return seconds

            if op.parameters:
                yield Term(kind, decisions_on_weights(op), cost)

        for op in graph.operations:  # [1]
            yield from of_weights(CostKind.COMPUTE, op, "update")
        yield from of_weights(overlapped, graph.operations[0], "gather")
        for op, following in zip_longest(graph.operations, graph.operations[1:]):  # [2]
            yield from self._shuffles(op, backward=False)
            if following is not None:
                yield from of_weights(overlapped, following, "gather")
            yield computing(op, "forward")
        for op, following in zip_longest(reversed(graph.operations), reversed(graph.operations[:-1])):  # [3]
            if following is not None:
                yield from of_weights(overlapped, following, "gather")
            yield computing(op, "backward")
            yield from of_weights(overlapped, op, "bpa")
            yield from self._shuffles(op, backward=True)

    def _shuffles(self, op: Operation, *, backward: bool) -> Iterator[Term]:
        for value in op.inputs:
            layer = self.graph.layer_of(value)
            # Operations of one deciding layer share its grid.
            if layer == op.layer or (backward and not value.requires_grad):
                continue
            # x=value binds the value now: a closure would read the last one of the loop.
            if backward:
                yield Term(CostKind.COMPUTE, (layer, op.layer), lambda u, v, x=value: self.costs.shuffle(x, v, u))
            else:
                yield Term(CostKind.COMPUTE, (layer, op.layer), lambda u, v, x=value: self.costs.shuffle(x, u, v))

    def problem(
        self, candidates: Mapping[str, Sequence[Candidate]], sharding: Sequence[str | bool] = (False,)
    ) -> AssignmentProblem:
        """Return the cost tables over some candidates.

        Parameters
        ----------
        candidates : mapping of str to sequence
            Candidates of each deciding layer.
        sharding : sequence of str or bool
            Axes over which each deciding layer may shard its weights.

        Returns
        -------
        AssignmentProblem
            With one variable for each layer, in the order of the mapping. If ``sharding`` has several elements, as many
            variables follow, one for each layer: indices of ``sharding``.
        """
        options: dict[str, list[Any]] = {name: [self.parts(c) for c in each] for name, each in candidates.items()}
        options |= {sharding_of(name): list(sharding) for name in candidates}
        variables = list(candidates) + [sharding_of(name) for name in candidates] * (len(sharding) > 1)
        index = {name: variable for variable, name in enumerate(variables)}
        return AssignmentProblem(
            tuple(len(options[name]) for name in variables),
            tuple(_merge_compute_terms(self._time_tables(options, index))),
            tuple(self._memory_tables(options, index)),
        )

    def _time_tables(self, options: Mapping[str, list[Any]], index: Mapping[str, int]) -> Iterator[CostTerm]:
        """Yield the steps that take time under some choice. Gathers take none if no layer shards its weights."""
        steps = (self._table(term, options, index) for term in self.time)
        return (step for step in steps if step.table.any())

    def _memory_tables(self, options: Mapping[str, list[Any]], index: Mapping[str, int]) -> Iterator[CostTerm]:
        """Yield the memory steps; each RELEASE shares the table of its KEEP, by identity."""
        kept: dict[int, CostTerm] = {}
        for term in self.memory:
            # A tensor is allocated and freed by terms with the same cost function. Both must have one table, because
            # memory_rows finds the KEEP of a RELEASE by the identity of its table.
            shared = kept.get(id(term.cost))
            step = self._table(term, options, index) if shared is None else shared
            kept[id(term.cost)] = step
            yield CostTerm(term.kind, step.variables, step.table)

    @staticmethod
    def _table(term: Term, options: Mapping[str, list[Any]], index: Mapping[str, int]) -> CostTerm:
        # A decision with one option is no variable.
        variables = tuple(index[name] for name in term.decisions if name in index)
        sizes = [len(options[name]) for name in term.decisions if name in index]
        values = [term.cost(*choice) for choice in product(*(options[name] for name in term.decisions))]
        return CostTerm(term.kind, variables, np.array(values, dtype=np.float64).reshape(sizes))

    def predict(self, strategy: Assignment, sharding: Mapping[str, str | bool] | None = None) -> tuple[float, float]:
        """Return seconds and bytes of one strategy.

        Parameters
        ----------
        strategy : mapping
            Parts of each deciding layer.
        sharding : mapping of str to str or bool, optional
            Axes over which deciding layers shard their weights. Others keep full weights.

        Returns
        -------
        tuple of float
            Seconds per step and peak bytes.
        """
        chosen = self.decisions(strategy, sharding)

        def terms(steps: tuple[Term, ...]) -> Iterator[tuple[CostKind, float]]:
            return ((term.kind, term.cost(*[chosen[name] for name in term.decisions])) for term in steps)

        return float(makespan(terms(self.time), max)), float(peak(terms(self.memory), max))

    def decisions(self, strategy: Assignment, sharding: Mapping[str, str | bool] | None = None) -> dict[str, Any]:
        """Return the value of every decision on which terms depend.

        Parameters
        ----------
        strategy, sharding : mapping
            As in :meth:`predict`.

        Returns
        -------
        dict of str to AxisParts, str or bool
            The grid of each layer, and the axes over which it shards its weights.
        """
        chosen: dict[str, Any] = {name: self.parts(candidate) for name, candidate in strategy.items()}
        return chosen | {sharding_of(name): (sharding or {}).get(name, False) for name in strategy}


def _merge_compute_terms(steps: Iterator[CostTerm]) -> Iterator[CostTerm]:
    """Yield the steps with all COMPUTE tables of the same layers between two all-reduces added up."""
    # The order of computation between two all-reduces does not change the makespan, and fewer tables are faster.
    sums: dict[tuple[int, ...], Any] = {}
    for step in steps:
        if step.kind is CostKind.COMPUTE:
            earlier = sums.get(step.variables)
            sums[step.variables] = step.table if earlier is None else earlier + step.table
            continue
        yield from (CostTerm(CostKind.COMPUTE, variables, table) for variables, table in sums.items())
        sums.clear()
        yield step
    yield from (CostTerm(CostKind.COMPUTE, variables, table) for variables, table in sums.items())


def evaluate(
    graph: LayerGraph,
    plan: Plan | Assignment,
    machine: Machine,
    ranks: int,
    *,
    shard_weights: str | bool | None = None,
    **assumptions: Any,
) -> Prediction:
    """Predict time and memory of a training step under a plan.

    Source: Dryden et al. 2019, V-A and V-B.

    Parameters
    ----------
    graph : LayerGraph
        Network, from :func:`trace`.
    plan : Plan or mapping
        Plan, or the parts of each deciding layer by its name. Patterns such as ``"*"`` are allowed.
    machine : Machine
        Hardware model.
    ranks : int
        Number of ranks.
    shard_weights : str or bool, optional
        Axes over which all layers shard their weights, as in :func:`parallelize`. Default: those of a Plan, or False.
    **assumptions
        Fields of :class:`Settings`. ``batch_norm`` defaults to the Plan's.

    Returns
    -------
    Prediction
        Seconds, bytes and the times of each layer.

    Raises
    ------
    PlanError
        If the plan names an unknown layer or axis, omits the first layer, or does not fit ``ranks``.
    SettingsError
        If an assumption is invalid.
    UnsupportedOperation
        If the ranks along the axes of ``shard_weights`` are not neighbours.
    """
    strategy = resolve(graph, plan, ranks)
    # The caller's assumptions have priority over the plan's.
    if isinstance(plan, Plan):
        assumptions = {"batch_norm": plan.batch_norm} | assumptions
    model = StepModel.cached(graph, machine, ranks, Settings(**assumptions))
    # The layers' times are without overlap, so what they exceed the step by is hidden.
    sharding = resolve_sharding(graph, plan, shard_weights)
    time, memory = model.predict(strategy, sharding)
    chosen = model.decisions(strategy, sharding)
    layers = _predict_layers(model, strategy, chosen)
    spent = sum(layer.spent for layer in layers.values())
    lasting = sum(
        lasting_bytes(op, model.costs, *[chosen[name] for name in decisions_on_weights(op)]) for op in graph.operations
    )
    return Prediction(time, memory, layers, max(0.0, spent - time), lasting, unknown_functions(graph))


def _predict_layers(model: StepModel, strategy: Assignment, chosen: Mapping[str, Any]) -> dict[str, LayerPrediction]:
    """Return the summed times of each deciding layer: its operations and the redistribution of their inputs."""
    sums: dict[str, dict[str, float]] = {name: dict.fromkeys(_TIME_FIELDS, 0.0) for name in strategy}
    for op in model.graph.operations:
        cost, total = model.costs.operation(op, *[chosen[name] for name in decisions_on_weights(op)]), sums[op.layer]
        for figure in ("fp", "bpx", "bpw", "bpa", "update"):
            total[figure] += getattr(cost, figure)
        # The last operation's weights are still there when backward begins.
        total["gather"] += cost.gather * (1 if op is model.graph.operations[-1] else 2)
        total["halo"] += cost.halo_forward + cost.halo_backward
        total["sync"] += cost.sync_forward + cost.sync_backward
        for value in op.inputs:
            here, there = chosen[model.graph.layer_of(value)], chosen[op.layer]
            back = model.costs.shuffle(value, there, here) if value.requires_grad else 0.0
            total["shuffle"] += model.costs.shuffle(value, here, there) + back
    return {name: LayerPrediction(dict(strategy[name]), **figures) for name, figures in sums.items()}
