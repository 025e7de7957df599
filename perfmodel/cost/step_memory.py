"""Memory of a training step on the rank with the most, as terms of a strategy's problem.

There are two models::

    autograd   weights, gradients and optimizer state; what autograd saves, until the backward pass of its operation;
               activation gradients and unsaved results that wait for a later operation; the working set
               of each operation
    keep-all   every output and every activation gradient, for the full step: the paper's implementation

Both add the halos that a rank receives, redistributed copies of inputs, and the workspace. A function that has no
distributed operator is computed replicated and saves full tensors. Sharded weights add what is gathered: the weights of
one group of layers and of the next one, and in backward gradients that are not yet reduce-scattered.

Terms are in the order of the forward pass (see :func:`.peak`). A KEEP without a RELEASE is a tensor that autograd
saves: it stays from the forward of its operation to the backward, hence at all later points of the forward pass. A KEEP
with a RELEASE lives between two operations only. Gradients are resident, because they exist when the optimizer runs.

Source: Dryden et al. 2019, V and VI-B1 (which samples fit a GPU). The paper does not give these terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from distconv.dispatch import has_operator
from distconv.parameters.gathered_layers import GROUP_BYTES
from distconv.parameters.sharded_axes import sharded_axes
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, local_shape
from distconv.perfmodel.cost.cost_tables import CostKind, Term
from distconv.perfmodel.cost.operation_cost import OperationCosts, sharded_bytes
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.graph import INPUT, LayerGraph, Operation, Value


def memory_terms(graph: LayerGraph, costs: OperationCosts) -> Iterator[Term]:
    """Yield the memory terms of a graph in the order of its forward pass.

    Parameters
    ----------
    graph : LayerGraph
    costs : OperationCosts
        Costs whose settings select the model.

    Yields
    ------
    Term
        Bytes.
    """

    def state_bytes(op: Operation, parts: AxisParts, sharded: str | bool = False) -> float:
        # Weights and optimizer state, and the gradients.
        gradients = sharded_bytes(op, local_call(op, parts), parts, sharded).held
        return lasting_bytes(op, costs, parts, sharded) + gradients

    for op in graph.operations:
        yield Term(CostKind.RESIDENT, decisions_on_weights(op), partial(state_bytes, op))
    workspace = costs.settings.workspace
    yield Term(CostKind.RESIDENT, (), lambda: workspace)
    activations = _keep_all(graph) if costs.settings.memory_model == "keep-all" else _autograd(graph)
    gathered = _GatherTerms(graph)
    for position, terms in enumerate(activations):
        yield from gathered.terms_before(position)
        yield from terms


def decisions_on_weights(op: Operation) -> tuple[str, ...]:
    """Return the decisions on which terms of an operation's parameters depend: grid and sharding of its layer.

    Only deciding layers shard their weights, since a plan names no others.

    Parameters
    ----------
    op : Operation

    Returns
    -------
    tuple of str
    """
    return (op.layer, sharding_of(op.layer)) if op.decides and op.parameters else (op.layer,)


def sharding_of(layer: str) -> str:
    """Return the name of the decision over which axes a layer shards its weights.

    Parameters
    ----------
    layer : str

    Returns
    -------
    str
    """
    return f"weights of {layer}"


def block_bytes(value: Value, parts: AxisParts) -> float:
    """Return the bytes of the largest block of a value.

    Parameters
    ----------
    value : Value
    parts : AxisParts

    Returns
    -------
    float
    """
    return float(math.prod(local_shape(value.shape, parts)) * value.itemsize)


def lasting_bytes(op: Operation, costs: OperationCosts, parts: AxisParts, sharded: str | bool = False) -> float:
    """Return the bytes of an operation's weights and optimizer state, which stay allocated between steps.

    Parameters
    ----------
    op : Operation
    costs : OperationCosts
    parts : AxisParts
        Grid of its layer.
    sharded : str or bool
        Axes over which its weights are sharded.

    Returns
    -------
    float
    """
    call = local_call(op, parts)
    weights = sharded_bytes(op, call, parts, sharded)
    ranks = 1 if weights.gathered else costs.optimizer_ranks(call, parts)
    return weights.held * (1 + costs.settings.optimizer_slots / ranks)


def _received_bytes(op: Operation, parts: AxisParts) -> float:
    """Return the bytes of ghosts and channels that are received with the input."""
    extents = list(local_call(op, parts).inputs[0])
    own = math.prod(local_shape(op.x.shape, parts))
    if op.window is not None:
        for dim, axis in enumerate(axes_of(op.x.shape)):
            if dim >= 2 and parts.parts_along(axis) > 1:
                # An upper bound of the halo: the full reach of the kernel.
                reach = (op.window.kernel[dim - 2] - 1) * op.window.dilation[dim - 2]
                extents[dim] = min(extents[dim] + reach, op.x.shape[dim])
    return float(max(0, math.prod(extents) - own) * op.x.itemsize)


def _redistributed_inputs(graph: LayerGraph, op: Operation) -> Iterator[tuple[str, Value]]:
    """Yield the inputs of ``op`` that have another layer's distribution, with that layer."""
    for value in op.inputs:
        layer = graph.layer_of(value)
        if layer != op.layer:
            yield layer, value


def _copy(value: Value, copies: int) -> Callable[[AxisParts, AxisParts], float]:
    def size(source: AxisParts, target: AxisParts) -> float:
        return 0.0 if source == target else copies * block_bytes(value, target)

    return size


def _keep_all(graph: LayerGraph) -> Iterator[list[Term]]:
    """Yield the terms of each operation."""
    # The network's input has no gradient. All other tensors count twice: values and gradients.
    x = graph.operations[0].x
    terms = [Term(CostKind.KEEP, (graph.input_layer,), lambda parts: block_bytes(x, parts))]
    for op in graph.operations:
        if not op.view:
            for value in op.outputs:
                terms.append(Term(CostKind.KEEP, (op.layer,), lambda parts, value=value: 2 * block_bytes(value, parts)))
        terms.append(Term(CostKind.KEEP, (op.layer,), lambda parts, op=op: 2 * _received_bytes(op, parts)))
        for layer, value in _redistributed_inputs(graph, op):
            terms.append(Term(CostKind.KEEP, (layer, op.layer), _copy(value, 2)))
        # What is gathered for the operation counts while it runs.
        terms.append(Term(CostKind.TRANSIENT, (), lambda: 0.0))
        yield terms
        terms = []


def _autograd(graph: LayerGraph) -> Iterator[list[Term]]:
    """Yield the terms of each operation."""
    kept = _SavedTensors(graph)
    # The last operation that reads each result.
    lasts = {(value.producer, value.storage): op.index for op in graph.operations for value in op.inputs}
    waiting: dict[int, list[Term]] = {}
    for op in graph.operations:
        # A result that this operation reads last is part of its working set, and counts there.
        terms = [*waiting.pop(op.index, []), *kept.terms(op)]
        terms.append(Term(CostKind.TRANSIENT, (op.layer,), lambda parts, op=op: _working_bytes(op, parts)))
        for layer, value in _redistributed_inputs(graph, op):
            # Twice: the redistributed input, and in backward its gradient.
            terms.append(Term(CostKind.TRANSIENT, (layer, op.layer), _copy(value, 2)))
        for value in op.outputs:
            last = lasts.get((value.producer, value.storage), op.index)
            if last > op.index + 1 and not op.view and value.elements > 1:
                # Its gradient (or the unsaved result itself) stays allocated until that last operation.
                # KEEP and RELEASE are paired by the identity of `size`.
                layers, size = (op.layer,), partial(block_bytes, value)
                waiting.setdefault(last, []).append(Term(CostKind.RELEASE, layers, size))
                terms.append(Term(CostKind.KEEP, layers, size))
        yield terms


class _GatherTerms:
    """Terms of gathered weights, which stay for the operations of some groups of layers.

    Groups are gathered one ahead, so in backward the full weights of group g exist from group g + 1 to g, its full
    gradients during g, and during g - 1 a reduce-scatter sends these and receives as much, except this rank's part.
    The forward pass needs less.
    """

    def __init__(self, graph: LayerGraph) -> None:
        operations = graph.operations
        self._terms: dict[int, list[Term]] = {}
        groups = _groups_of_layers(operations)
        for number, group in enumerate(groups):
            first, last = group[0], group[-1]
            before = groups[number - 1][0] if number else first
            after = groups[number + 1][-1] if number + 1 < len(groups) else last
            for position in group:
                op = operations[position]
                # A partial for each: KEEP and RELEASE are paired by identity.
                self._keep(op, first, after, partial(_gathered_bytes, op))
                self._keep(op, first, last, partial(_gathered_bytes, op))
                if before < first:
                    self._keep(op, before, first - 1, partial(_reducing_bytes, op))

    def _keep(self, op: Operation, first: int, last: int, size: Callable[[AxisParts, str | bool], float]) -> None:
        layers = decisions_on_weights(op)
        self._terms.setdefault(first, []).append(Term(CostKind.KEEP, layers, size))
        self._terms.setdefault(last + 1, []).append(Term(CostKind.RELEASE, layers, size))

    def terms_before(self, position: int) -> list[Term]:
        """Return the terms that begin or end before an operation. Those after the last one end with the step."""
        return self._terms.get(position, [])


def _groups_of_layers(operations: Sequence[Operation]) -> list[list[int]]:
    """Return the operations whose weights are gathered together, by their positions."""
    groups: list[list[int]] = []
    size = float(GROUP_BYTES)
    for position, op in enumerate(operations):
        if op.decides and op.parameters:
            if size >= GROUP_BYTES:
                groups.append([])
                size = 0.0
            groups[-1].append(position)
            size += sum(constant.elements * constant.itemsize for constant in op.parameters)
    return groups


def _gathered_bytes(op: Operation, parts: AxisParts, sharded: str | bool) -> float:
    return sharded_bytes(op, local_call(op, parts), parts, sharded).gathered


def _reducing_bytes(op: Operation, parts: AxisParts, sharded: str | bool) -> float:
    """Return the bytes of gradients that are sent and received while they are reduce-scattered."""
    gathered = _gathered_bytes(op, parts, sharded)
    return gathered * (2 - 1 / parts.group(sharded_axes(parts, sharded)).ranks)


def _working_bytes(op: Operation, parts: AxisParts) -> float:
    """Return the bytes in use while ``op`` runs: inputs and outputs, or in backward their gradients."""
    call = local_call(op, parts)
    inputs = sum(math.prod(s) * v.itemsize for s, v in zip(call.inputs, op.inputs, strict=True))
    outputs = sum(math.prod(s) * v.itemsize for s, v in zip(call.outputs, op.outputs, strict=True))
    return float(0 if op.view else outputs + (0 if op.in_place else inputs))


class _SavedTensors:
    """Assigns each saved tensor to the layers whose distribution it has, and counts it once for each of them.

    A tensor that operations of two layers save exists twice if the layers have different grids, otherwise once.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.makers: dict[int, str] = {}
        for op in graph.operations:
            for value in op.outputs:
                self.makers.setdefault(value.storage, op.layer)
        self.counted: set[tuple[int, str]] = set()

    def terms(self, op: Operation) -> Iterator[Term]:
        """Yield terms for the tensors that ``op`` is the first to save."""
        yield Term(CostKind.KEEP, (op.layer,), lambda parts: _received_bytes(op, parts) if op.saved else 0.0)
        for value in op.saved:
            maker = self.makers.get(
                value.storage, self.graph.input_layer if self._is_network_input(op, value) else op.layer
            )
            if (value.storage, op.layer) in self.counted:
                continue
            self.counted.add((value.storage, op.layer))
            # The maker's layer has saved it already: a second copy exists only if the grids differ.
            if maker != op.layer and (value.storage, maker) in self.counted:
                yield Term(CostKind.KEEP, (maker, op.layer), _copy(value, 1))
            else:
                # Saved on the grid where it is used: the original, or the redistributed copy.
                yield Term(CostKind.KEEP, (op.layer,), partial(self._size, op, value))

    @staticmethod
    def _size(op: Operation, value: Value, parts: AxisParts) -> float:
        return block_bytes(value, parts) if has_operator(op.function) else float(value.elements * value.itemsize)

    @staticmethod
    def _is_network_input(op: Operation, value: Value) -> bool:
        return any(v.storage == value.storage and v.producer == INPUT for v in op.inputs)
