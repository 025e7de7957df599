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


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, (torch.Tensor, GradientEdge)) or values is None else list(values)


def _block(tensor: Any, like: Any) -> Any:
    """Return the block of ``tensor``, distributed as ``like`` if that is a DistTensor; otherwise ``tensor``."""
    if isinstance(like, DistTensor) and tensor is not None:
        return to_distribution(tensor, like.dist).local
    return tensor


def _blocks_of(outputs: Any, seeds: Any) -> tuple[list[Any], list[Any]]:
    """Return the blocks of ``outputs`` and of their gradients; a loss of one element is replicated. Collective."""
    whole = [o.replicated() if isinstance(o, DistTensor) and o.numel() == 1 else o for o in _listed(outputs)]
    given = _listed(seeds)
    given = [None] * len(whole) if len(given) == 1 and given[0] is None else given
    return [_block(o, o) for o in whole], [_block(s, o) for s, o in zip(given, whole, strict=True)]


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
    """Compute ``torch.autograd.backward`` from blocks. Parameters as in torch."""
    whole, seeds = _blocks_of(tensors, grad_variables if grad_tensors is None else grad_tensors)
    inputs = None if inputs is None else [_block(i, i) for i in _listed(inputs)]
    torch.autograd.backward(whole, seeds, retain_graph, create_graph, inputs=inputs)


@implements(torch.autograd.grad, kind=OperatorKind.EFFECT, tensors=None)
def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Compute ``torch.autograd.grad`` from blocks: full gradients of plain inputs, distributed ones of DistTensors.

    Parameters as in torch.
    """
    if options.pop("is_grads_batched", False):
        return _batched(outputs, inputs, _listed(grad_outputs), options)
    whole, seeds = _blocks_of(outputs, grad_outputs)
    wanted = _listed(inputs)
    gradients = torch.autograd.grad(
        whole,
        [_block(i, i) for i in wanted],
        seeds,
        **options,
    )
    return tuple(
        DistTensor(g, i.dist, i.shape) if isinstance(i, DistTensor) and g is not None else g
        for g, i in zip(gradients, wanted, strict=True)
    )


def _batched(outputs: Any, inputs: Any, seeds: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Call :func:`grad` for each of the gradients along the first dimension of ``seeds``, and stack the results."""
    count = len(seeds[0])
    last = {"retain_graph": options.get("create_graph", False), **options}
    each = [
        grad(outputs, inputs, [s[i] for s in seeds], **(last if i == count - 1 else {**options, "retain_graph": True}))
        for i in range(count)
    ]
    return tuple(None if gradients[0] is None else torch.stack(gradients) for gradients in zip(*each, strict=True))
