"""Second derivatives of backward passes that are not differentiable themselves.

Either the function is computed again from operators that have derivatives (:func:`differentiable_gradients`), or a
second derivative raises (:func:`first_order_only`). Layers with fast backward passes use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from distconv.errors import UnsupportedOperation


def first_order_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of ``backward`` that raises if the backward pass must be differentiable.

    torch's ``once_differentiable`` raises only if the incoming gradient requires a gradient itself. That of a loss does
    not: the result would be a constant, and a gradient penalty would silently add nothing.

    Parameters
    ----------
    what : str
        The operation, for the error.

    Returns
    -------
    callable
        Decorates the ``backward`` of an autograd Function, which raises UnsupportedOperation under
        ``create_graph=True``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            # torch enables gradients in backward only with create_graph=True.
            if torch.is_grad_enabled():
                raise UnsupportedOperation(
                    f"a second derivative (create_graph=True) of {what} has no rule; torch's operators have: gather() "
                    "the tensors first, make sparse ones dense, or use a grid of one rank"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate


def differentiable_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the gradients of a function such that they can be differentiated again.

    Fast backward passes call it under ``create_graph=True``: the function is computed again from operators that have
    derivatives, and autograd records its backward pass.

    Parameters
    ----------
    function : callable
        Maps ``inputs`` to one tensor, by differentiable operators.
    inputs : sequence of (Tensor or None)
        Its arguments.
    needed : sequence of bool
        The inputs whose gradients are needed.
    gradient : Tensor
        dL/dy.

    Returns
    -------
    list of (Tensor or None)
        dL/dx for each input; None if it is not needed.

    Warnings
    --------
    All ranks must record the same graph, those with an empty block too: the messages of backward passes follow from it.
    """
    with torch.enable_grad():
        # Views, which separate the inputs: one may have been computed from another, and must not get its gradient.
        given = [t.view_as(t) if t is not None and n else t for t, n in zip(inputs, needed, strict=True)]
        wanted = [t for t, n in zip(given, needed, strict=True) if t is not None and n]
        derivatives = iter(torch.autograd.grad(function(*given), wanted, gradient, create_graph=True))
    return [next(derivatives) if t is not None and n else None for t, n in zip(given, needed, strict=True)]
