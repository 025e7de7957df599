"""``torch.autograd.detect_anomaly`` over ranks: all of them learn of a NaN that a step gives on any.

torch raises as soon as it sees one. On its rank alone, which the others would wait for: here the backward pass goes on
to its end, and then all ranks raise for the first one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from distconv.communication.transfer import TransferPlan
from distconv.errors import NumericalError
from distconv.grid import ProcessGrid
from distconv.process import watchdog


def is_nan_check_enabled() -> bool:
    """Whether backward passes look for NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@dataclass
class _Watch:
    """What a backward pass has come by: how many steps, and the first of them that gave a NaN."""

    steps: int = 0
    found: list[tuple[int, str, str]] = field(default_factory=list)
    """Its number, what torch says of it, and where its forward step was called."""

    def look(self, node: Any, gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        self.steps += 1
        wrong = [i for i, g in enumerate(gradients) if g is not None and not self.found and bool(g.isnan().any())]
        if wrong:
            said = f"Function '{node.name()}' returned nan values in its {wrong[0]}th output."
            self.found.append((self.steps, said, "".join(node.metadata.get("traceback_", ()))))


def run_with_nan_check(outputs: Iterable[Any], run: Callable[[], Any]) -> Any:
    """What ``run``, a backward pass from ``outputs``, returns. Collective where its graph is.

    Raises
    ------
    NumericalError
        On all ranks, if a step gave a NaN on any.
    """
    nodes = list(_nodes(outputs))
    grid = next((g for node in nodes for value in _kept_by(node) if (g := _grid_of(value)) is not None), None)
    if grid is None or grid.size == 1:
        return run()
    watch = _Watch()
    hooks = [node.register_hook(partial(watch.look, node)) for node in nodes]
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            result = run()
    finally:
        for hook in hooks:
            hook.remove()
    with watchdog.waiting(lambda: "search for NaN in gradients"):
        everywhere = grid.world.allgather(watch.found)
    first = min(((failure[0], rank) for rank, failure in enumerate(everywhere) if failure), default=None)
    if first is None:
        return result
    (_, said, forward), rank = first
    warnings.warn(f"Error detected on rank {rank}. Traceback of forward call that caused it:\n{forward}", stacklevel=3)
    raise NumericalError(f"{said} (on rank {rank})")


def _nodes(outputs: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the graph behind ``outputs``, tensors or edges, each once, in an order that is the same anywhere."""
    waiting = [end.node if isinstance(end, torch.autograd.graph.GradientEdge) else end.grad_fn for end in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(neighbour for neighbour, _ in node.next_functions)


def _kept_by(node: Any) -> list[Any]:
    """What a node of a Python function keeps besides its tensors."""
    return [*vars(node).values()] if hasattr(node, "__dict__") else []


def _grid_of(value: Any) -> ProcessGrid | None:
    grid = value.dst.grid if isinstance(value, TransferPlan) else getattr(value, "grid", value)
    return grid if isinstance(grid, ProcessGrid) else None
