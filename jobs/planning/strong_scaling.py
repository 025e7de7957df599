"""Predicted step times over numbers of ranks: planned, pure sample and pure spatial parallelism (strong scaling)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distconv.errors import PlanError
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.selection import Strategy, select

SEARCH_S = 2.0
"""Seconds of search for each number of ranks: in most networks the best plan is proven by then."""


@dataclass(frozen=True)
class Point:
    """Seconds per step and bytes on the fullest rank."""

    time: float
    memory: float

    @classmethod
    def of(cls, found: Strategy | Prediction) -> Point:
        """What was predicted."""
        return cls(found.time, found.memory)


Curves = dict[str, dict[int, Point]]
"""By the kind of parallelism and the number of ranks; what is not possible is not there."""


def rank_counts(most: int) -> list[int]:
    """Powers of two up to ``most``, and ``most`` itself.

    >>> rank_counts(6)
    [1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def strategies(
    graph: LayerGraph,
    machine: Machine,
    counts: Iterable[int],
    memory: float | None = None,
    method: str = "exact",
    **assumptions: Any,
) -> dict[int, Strategy]:
    """A plan for each number of ranks on which one fits into ``memory`` bytes per rank."""
    found = {}
    for ranks in counts:
        try:
            found[ranks] = select(graph, machine, ranks, memory=memory, method=method, seconds=SEARCH_S, **assumptions)
        except PlanError:
            continue
    return found


def curves(planned: Mapping[int, Strategy]) -> Curves:
    """Predictions of the plans and of pure parallelism on as many ranks."""
    found: Curves = {"planned": {ranks: Point.of(strategy) for ranks, strategy in planned.items()}}
    for ranks, strategy in planned.items():
        for name, alone in strategy.uniform.items():
            if alone is not None:
                found.setdefault(f"pure {name}", {})[ranks] = Point.of(alone)
    return found
