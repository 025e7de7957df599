"""Gradient edges: gradients that users pass to the graph, or get from it, are full tensors and never blocks.

torch's functions of edges do not dispatch to tensor subclasses. The patches declared here convert gradients where
``torch.autograd.grad`` and ``backward`` start and end; they are applied when distconv starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import graph

from distconv.autograd import anomalies
from distconv.autograd.graph_nodes import BlockLayout
from distconv.errors import ShapeError
from distconv.process import patches
from distconv.tensor import LAYOUTS, DistTensor

_LAYOUT = "distconv layout of output"
"""With an output's number, key of a DistTensor's layout in the metadata of its node: an edge has no tensor."""

_node_of, _made, _run = graph._get_grad_fn_or_grad_acc, torch.autograd._make_grads, graph._engine_run_backward


def _node(tensor: torch.Tensor) -> Any:
    """Return the node of a tensor's edge, which stores the layout of a DistTensor."""
    if not isinstance(tensor, DistTensor):
        return _node_of(tensor)
    node: Any = _node_of(tensor.local)
    # By output number: a node has several outputs, each with a layout of its own.
    node.metadata[_LAYOUT, tensor.local.output_nr] = (tensor.dist, tensor.shape)
    return node


def _layout(end: Any) -> BlockLayout:
    """Return the layout of gradients at a tensor or edge; None if it is not the edge of a DistTensor."""
    if not isinstance(end, graph.GradientEdge):
        return None
    node: Any = end.node
    return node.metadata.get((_LAYOUT, end.output_nr))


def _gradient_seed(output: Any, gradient: Any) -> Any:
    """Return the gradient of an output as autograd needs it: a block at the edge of a DistTensor, or a plain tensor.

    Raises
    ------
    ShapeError
        If it does not have the shape of the edge's tensor.
    """
    layout = None if gradient is None else _layout(output)
    if layout is None:
        return gradient.gather() if isinstance(gradient, DistTensor) else gradient
    if gradient.shape != layout[1]:
        raise ShapeError(f"gradient of shape {tuple(gradient.shape)} at the edge of a tensor of {tuple(layout[1])}")
    return LAYOUTS.block(gradient, layout)


def _make_gradient_seeds(outputs: Sequence[Any], gradients: Sequence[Any], is_grads_batched: bool) -> Any:
    """Replace torch's ``_make_grads``, which checks the gradients of outputs and creates missing ones."""
    # Without ``strict`` for a wrong number of gradients, so that torch raises its own error.
    pairs = zip(outputs, gradients, strict=len(outputs) == len(gradients))
    return _made(outputs, [_gradient_seed(o, g) for o, g in pairs], is_grads_batched)


def _run_backward(
    outputs: Any, seeds: Any, keep: Any, create: Any, inputs: Sequence[Any], *options: Any, **named: Any
) -> Any:
    """Replace torch's ``_engine_run_backward``; the gradients at edges of DistTensors are returned as DistTensors."""

    def run() -> Any:
        return _run(outputs, seeds, keep, create, inputs, *options, **named)

    results = anomalies.run_with_nan_check(outputs, run) if anomalies.is_nan_check_enabled() else run()
    return LAYOUTS.to_global(results, [_layout(i) for i in inputs]) if results else results


for _holder, _name, _function in (
    (graph, "_get_grad_fn_or_grad_acc", _node),
    (torch.autograd, "_make_grads", _make_gradient_seeds),
    (torch.autograd, "_engine_run_backward", _run_backward),
):
    patches.declare(_holder, _name, _function, "gradients at an edge of a DistTensor are blocks")
