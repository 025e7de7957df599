"""Backward passes in two halves: B gives the gradients of a stage's inputs, W those of its weights.

B runs through the full graph without the weights of convolutions and matrix products, and keeps the gradients that
reach these operators. W starts at each of them, so nothing is computed twice. Cheap gradients (biases of other
operators, batch norm), weights that several operators share, and autograd Functions in Python stay with B.

Source: Qi et al. 2024 (zero bubble pipeline parallelism), 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


class _Use(NamedTuple):
    """A parameter, and the only operator that uses it."""

    parameter: torch.Tensor
    operator: Node


@dataclass(frozen=True)
class WeightBackward:
    """Second half of a backward pass; holds the graph until it runs.

    Attributes
    ----------
    weights : list of list of Tensor
        Weights of each operator.
    edges : list of autograd edges
        The operators' nodes of the autograd graph.
    gradients : list of Tensor or None
        Gradient that reached each operator in the first half, or None for operators that no gradient reached.
    """

    weights: list[list[torch.Tensor]]
    edges: list[GradientEdge]
    gradients: list[torch.Tensor | None]

    def run(self) -> None:
        """Add the gradients of the weights to their ``.grad``."""
        for edge, gradient, weights in zip(self.edges, self.gradients, self.weights, strict=True):
            if gradient is not None:
                torch.autograd.backward([edge], [gradient], inputs=weights)


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> WeightBackward:
    """Run the first half of a backward pass.

    It sets ``.grad`` of the inputs, and adds to that of parameters which cannot wait.

    Parameters
    ----------
    outputs : sequence of Tensor
    gradients : sequence of Tensor
        Gradient of each output.
    inputs : sequence of Tensor
        Leaves of the stage.
    parameters : sequence of Tensor

    Returns
    -------
    WeightBackward
        The remaining work.
    """
    deferred: dict[Node, list[torch.Tensor]] = {}
    for use in _uses(outputs, parameters):
        deferred.setdefault(use.operator, []).append(use.parameter)
    # Biases and scales cost little, so their gradients are computed with those of the inputs.
    deferred = {operator: weights for operator, weights in deferred.items() if any(w.dim() > 1 for w in weights)}
    deferred_ids = {id(weight) for weights in deferred.values() for weight in weights}
    now = [*inputs, *(p for p in parameters if p.requires_grad and id(p) not in deferred_ids)]
    edges = [GradientEdge(operator, 0) for operator in deferred]
    targets: list[Any] = [*now, *edges]
    # The graph is kept for the weights' part, which runs later from the recorded edges.
    results = torch.autograd.grad(outputs, targets, gradients, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        for leaf, gradient in zip(now, results[: len(now)], strict=True):
            if gradient is not None:
                # Out of place: the first gradient may share memory with another tensor.
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return WeightBackward(list(deferred.values()), edges, list(results[len(now) :]))


def _uses(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Iterator[_Use]:
    """Yield the parameters that a single operator uses, directly or through views such as a transpose.

    The second half starts at output 0 of an operator, so operators of which another output is used are omitted.
    """
    users = _users(outputs)
    for parameter in parameters:
        # From the node that accumulates the gradient, follow nodes with one input (views) up to the operator, which has
        # more than one. Stop without an operator where several nodes use the value.
        node, above = None, [n for n in users if getattr(n, "variable", None) is parameter]
        while len(above) == 1 and len(users[above[0]]) == 1:
            node, _ = users[above[0]][0]
            if len(node.next_functions) > 1:
                break
            above, node = [node], None
        if node is not None and not issubclass(type(node), BackwardCFunction) and all(i == 0 for _, i in users[node]):
            yield _Use(parameter, node)


def _users(outputs: Sequence[torch.Tensor]) -> dict[Node, list[tuple[Node, int]]]:
    """Return for each node of the graph the nodes that use it, with the number of the output that they use."""
    users: dict[Node, list[tuple[Node, int]]] = {o.grad_fn: [] for o in outputs if o.grad_fn is not None}
    todo = list(users)
    while todo:
        node = todo.pop()
        for used, index in node.next_functions:
            if used is not None:
                if used not in users:
                    users[used] = []
                    todo.append(used)
                users[used].append((node, index))
    return users
