"""Strong scaling: predicted step times of plans and of pure parallelism over numbers of ranks.

Called by ``distconv plan --plot`` and the benchmarks. It predicts and needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distconv.errors import PlanError
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.selection import Strategy, select

SEARCH_S = 2.0
"""Seconds of search for each number of ranks. For most networks, the best plan is proven by then."""


@dataclass(frozen=True)
class ScalingPoint:
    """Seconds per step, and bytes on the rank with the peak memory."""

    time: float
    memory: float

    @classmethod
    def of(cls, prediction: Strategy | Prediction) -> ScalingPoint:
        """Return the point of a prediction."""
        return cls(prediction.time, prediction.memory)


Curves = dict[str, dict[int, ScalingPoint]]
"""Points by kind of parallelism and number of ranks, without impossible combinations."""


@dataclass(frozen=True)
class Scaling:
    """Curves, and the number of ranks up to which all layers were measured (None: no layer was)."""

    curves: Curves
    profiled: int | None = None

    @classmethod
    def of(cls, graph: LayerGraph, machine: Machine, planned: Mapping[int, Strategy]) -> Scaling:
        """Return the curves of plans.

        Parameters
        ----------
        graph : LayerGraph
        machine : Machine
        planned : mapping
            Strategies by number of ranks.

        Returns
        -------
        Scaling
        """
        return cls(scaling_curves(planned), last_profiled_count(graph, machine, planned))

    @property
    def profile_end(self) -> int | None:
        """Last number of ranks with measured layers, or None if there are none or all are measured."""
        return None if self.profiled is None or self.profiled == max(self.curves["planned"]) else self.profiled


def rank_counts(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most`` itself.

    Examples
    --------
    >>> rank_counts(6)
    [1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def select_strategies(
    graph: LayerGraph,
    machine: Machine,
    counts: Iterable[int],
    memory: float | None = None,
    method: str = "exact",
    **assumptions: Any,
) -> dict[int, Strategy]:
    """Select a plan for each number of ranks.

    Parameters
    ----------
    graph : LayerGraph
    machine : Machine
    counts : iterable of int
        Numbers of ranks.
    memory : float, optional
        Limit in bytes per rank.
    method : str
        Search method of :func:`distconv.perfmodel.strategy.selection.select`.
    **assumptions
        Further keyword arguments of ``select``.

    Returns
    -------
    dict of int to Strategy
        Without the numbers of ranks on which no plan is possible.
    """
    chosen = {}
    for ranks in counts:
        try:
            chosen[ranks] = select(graph, machine, ranks, memory=memory, method=method, seconds=SEARCH_S, **assumptions)
        except PlanError:  # such as too little memory on few ranks, or too few rows on many
            continue
    return chosen


def scaling_curves(planned: Mapping[int, Strategy]) -> Curves:
    """Return the curves of the plans and of pure parallelism on the same numbers of ranks."""
    curves_of: Curves = {"planned": {ranks: ScalingPoint.of(strategy) for ranks, strategy in planned.items()}}
    for ranks, strategy in planned.items():
        for name, alone in strategy.uniform.items():
            if alone is not None:
                curves_of.setdefault(f"pure {name}", {})[ranks] = ScalingPoint.of(alone)
    return curves_of


def last_profiled_count(graph: LayerGraph, machine: Machine, planned: Mapping[int, Strategy]) -> int | None:
    """Return the largest number of ranks up to which all convolution and linear layers of the plans were measured.

    Beyond it times are estimated by the roofline, and a curve may have a step there.

    Parameters
    ----------
    graph : LayerGraph
    machine : Machine
    planned : mapping
        Strategies by number of ranks.

    Returns
    -------
    int or None
        None if layers of the smallest number of ranks were not measured.
    """
    last = None
    for ranks, strategy in sorted(planned.items()):
        table = machine.computing(ranks).table
        for name, layer in strategy.prediction.layers.items():
            parts = AxisParts.from_axes(layer.parts, ranks, machine.ranks_per_node)
            if any(f"{local_call(op, parts).key} forward" not in table for op in graph.by_layer.get(name, ())):
                return last
        last = ranks
    return last
