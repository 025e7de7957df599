"""Edges of autograd's graph, by which gradients are asked for and given: what passes there is whole, never a block.

torch neither asks an edge nor the gradient that it is given for a plain tensor whether they are distributed. The
patches declared here are applied when distconv starts.
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

_node_of, _made, _run = graph._get_grad_fn_or_grad_acc, torch.autograd._make_grads, graph._engine_run_backward


def _node(tensor: torch.Tensor) -> Any:
    """The node at which torch's ``get_gradient_edge`` lets an edge of ``tensor`` end."""
    if not isinstance(tensor, DistTensor):
        return _node_of(tensor)
    node: Any = _node_of(tensor.local)
    node.metadata[_LAYOUT, tensor.local.output_nr] = (tensor.dist, tensor.shape)
    return node


def _layout(end: Any) -> BlockLayout:
    """How gradients at ``end`` are split; None if that is not the edge of a DistTensor."""
    if not isinstance(end, graph.GradientEdge):
        return None
    node: Any = end.node
    return node.metadata.get((_LAYOUT, end.output_nr))


def _seed(output: Any, gradient: Any) -> Any:
    """What autograd takes for the ``gradient`` of ``output``: a block at the edge of a DistTensor, or a plain tensor.

    Raises
    ------
    ShapeError
        If it has not the shape of the edge's tensor.
    """
    layout = None if gradient is None else _layout(output)
    if layout is None:
        return gradient.gather() if isinstance(gradient, DistTensor) else gradient
    if gradient.shape != layout[1]:
        raise ShapeError(f"gradient of shape {tuple(gradient.shape)} at the edge of a tensor of {tuple(layout[1])}")
    return LAYOUTS.block(gradient, layout)


def _seeds(outputs: Sequence[Any], gradients: Sequence[Any], is_grads_batched: bool) -> Any:
    pairs = zip(outputs, gradients, strict=len(outputs) == len(gradients))
    return _made(outputs, [_seed(o, g) for o, g in pairs], is_grads_batched)


def _gradients(
    outputs: Any, seeds: Any, keep: Any, create: Any, inputs: Sequence[Any], *options: Any, **named: Any
) -> Any:
    def run() -> Any:
        return _run(outputs, seeds, keep, create, inputs, *options, **named)

    results = anomalies.run_with_nan_check(outputs, run) if anomalies.is_nan_check_enabled() else run()
    return LAYOUTS.to_global(results, [_layout(i) for i in inputs]) if results else results


for _holder, _name, _function in (
    (graph, "_get_grad_fn_or_grad_acc", _node),
    (torch.autograd, "_make_grads", _seeds),
    (torch.autograd, "_engine_run_backward", _gradients),
):
    patches.declare(_holder, _name, _function, "gradients at an edge of a DistTensor are blocks")
