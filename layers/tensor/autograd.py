"""``torch.autograd.grad`` and ``backward`` of distributed tensors.

Autograd records operations on blocks. So outputs, inputs and gradients are replaced by their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from distconv.dispatch import OperatorKind, implements
from distconv.tensor import DistTensor, to_distribution


def _as_list(values: Any) -> list[Any]:
    # A GradientEdge is a named tuple, which list() would take apart.
    return [values] if isinstance(values, (torch.Tensor, GradientEdge)) or values is None else list(values)


def _block_like(tensor: Any, like: Any) -> Any:
    """Return the block of ``tensor``, distributed as ``like`` if that is a DistTensor; otherwise ``tensor``."""
    if isinstance(like, DistTensor) and tensor is not None:
        return to_distribution(tensor, like.dist).local
    return tensor


def _blocks_and_gradients(outputs: Any, seeds: Any) -> tuple[list[Any], list[Any]]:
    """Return the blocks of ``outputs`` and of their gradients; a loss of one element is replicated. Collective."""
    # Only one rank owns the element of a split loss. Replicated, it starts the same backward pass on all ranks.
    blocks = [o.replicated() if isinstance(o, DistTensor) and o.numel() == 1 else o for o in _as_list(outputs)]
    gradients = _as_list(seeds)
    # torch accepts a single None for any number of outputs.
    gradients = [None] * len(blocks) if len(gradients) == 1 and gradients[0] is None else gradients
    return [_block_like(o, o) for o in blocks], [_block_like(s, o) for s, o in zip(gradients, blocks, strict=True)]


@implements(torch.autograd.backward, kind=OperatorKind.EFFECT, tensors=None)
def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Compute ``torch.autograd.backward`` from blocks.

    Parameters
    ----------
    tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
        As in ``torch.autograd.backward``.
    """
    blocks, seeds = _blocks_and_gradients(tensors, grad_variables if grad_tensors is None else grad_tensors)
    inputs = None if inputs is None else [_block_like(i, i) for i in _as_list(inputs)]
    torch.autograd.backward(blocks, seeds, retain_graph, create_graph, inputs=inputs)


@implements(torch.autograd.grad, kind=OperatorKind.EFFECT, tensors=None)
def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute ``torch.autograd.grad`` from blocks: full gradients of plain inputs, distributed ones of DistTensors.

    Parameters
    ----------
    outputs, inputs, grad_outputs, **options
        As in ``torch.autograd.grad``.

    Returns
    -------
    tuple of (Tensor or None)
    """
    if options.pop("is_grads_batched", False):
        return _grad_batched(outputs, inputs, _as_list(grad_outputs), options)
    blocks, seeds = _blocks_and_gradients(outputs, grad_outputs)
    wanted = _as_list(inputs)
    gradients = torch.autograd.grad(
        blocks,
        [_block_like(i, i) for i in wanted],
        seeds,
        **options,
    )
    return tuple(
        DistTensor(g, i.dist, i.shape) if isinstance(i, DistTensor) and g is not None else g
        for g, i in zip(gradients, wanted, strict=True)
    )


def _grad_batched(outputs: Any, inputs: Any, seeds: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Call :func:`grad` for each of the gradients along the first dimension of ``seeds``, and stack the results."""
    count = len(seeds[0])
    # Every pass but the last keeps the graph for the next one; after the last one the caller's option holds.
    last = {"retain_graph": options.get("create_graph", False), **options}
    each = [
        grad(outputs, inputs, [s[i] for s in seeds], **(last if i == count - 1 else {**options, "retain_graph": True}))
        for i in range(count)
    ]
    return tuple(None if gradients[0] is None else torch.stack(gradients) for gradients in zip(*each, strict=True))
