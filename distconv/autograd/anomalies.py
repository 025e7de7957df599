"""``torch.autograd.detect_anomaly`` over ranks: all ranks raise if a backward step gives a NaN on any of them.

torch raises as soon as it finds a NaN. It would do so on one rank alone, and the others would wait for that rank's
messages. Here the backward pass runs to its end, and then all ranks raise for the first NaN.
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
    """Return True if backward passes search for NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@dataclass
class _NanSearch:
    """Search for the first step of a backward pass that gives a NaN."""

    steps: int = 0
    """Number of nodes that have run. All ranks run the same nodes in the same order, so numbers of ranks agree."""
    found: list[tuple[int, str, str]] = field(default_factory=list)
    """The step's number, torch's message, and the stack of the forward call. Empty or one entry."""

    def check(self, node: Any, gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        """Count a node that has run, and record the first one with a NaN in its results."""
        self.steps += 1
        # After the first NaN nothing is searched: later gradients follow from it.
        wrong = [i for i, g in enumerate(gradients) if g is not None and not self.found and bool(g.isnan().any())]
        if wrong:
            message = f"Function '{node.name()}' returned nan values in its {wrong[0]}th output."
            self.found.append((self.steps, message, "".join(node.metadata.get("traceback_", ()))))


def run_with_nan_check(outputs: Iterable[Any], run: Callable[[], Any]) -> Any:
    """Run a backward pass, and raise on all ranks if a step gave a NaN on any.

    Collective if the graph has distributed operators: call on every rank. Without one, or on a grid of one rank, this
    function only calls ``run``, and torch's own check applies.

    Parameters
    ----------
    outputs : iterable of Tensor or GradientEdge
        Where the pass begins.
    run : callable
        Runs the pass; called without arguments.

    Returns
    -------
    Any
        What ``run`` returned.

    Raises
    ------
    NumericalError
        On every rank, with the first step that gave a NaN.
    """
    nodes = list(_walk_graph(outputs))
    # Functions in Python store objects in their nodes, such as a transfer plan.
    saved = (value for node in nodes for value in (vars(node).values() if hasattr(node, "__dict__") else ()))
    grid = next((g for value in saved if (g := _grid_of(value)) is not None), None)
    # Only a backward pass with messages must end on all ranks.
    if grid is None or grid.size == 1:
        return run()
    search = _NanSearch()
    hooks = [node.register_hook(partial(search.check, node)) for node in nodes]
    try:
        # torch's own search is off, since it would raise on this rank alone; the stacks of forward calls remain on.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            result = run()
    finally:
        for hook in hooks:
            hook.remove()
    with watchdog.waiting(lambda: "search for NaN in gradients"):
        all_found = grid.world.allgather(search.found)
    # The earliest step, and of several ranks the lowest one: all ranks raise for the same NaN.
    first = min(((failure[0], rank) for rank, failure in enumerate(all_found) if failure), default=None)
    if first is None:
        return result
    (_, message, forward), rank = first
    warnings.warn(f"Error detected on rank {rank}. Traceback of forward call that caused it:\n{forward}", stacklevel=3)
    raise NumericalError(f"{message} (on rank {rank})")


def _walk_graph(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield each node of the graph of some tensors or edges once, in the same order on all ranks."""
    waiting = [end.node if isinstance(end, torch.autograd.graph.GradientEdge) else end.grad_fn for end in outputs]
    seen: set[Any] = set()
    while waiting:
        # Depth first, from lists that are the same on all ranks.
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(neighbour for neighbour, _ in node.next_functions)


def _grid_of(value: Any) -> ProcessGrid | None:
    """Return the grid of a saved object: a transfer plan, a grid, or anything with an attribute ``grid``."""
    grid = value.dst.grid if isinstance(value, TransferPlan) else getattr(value, "grid", value)
    return grid if isinstance(grid, ProcessGrid) else None
