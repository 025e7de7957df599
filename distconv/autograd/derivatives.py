"""Derivatives of backward passes: through the same function made of differentiable steps, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from distconv.errors import UnsupportedOperation


def first_order_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark the backward pass of ``what``: asked to be differentiated, it raises.

    torch's ``once_differentiable`` raises only where a gradient comes in that needs one itself. A loss's does not: the
    result would be a constant, and a penalty on gradients would silently add nothing.
    """

    def mark(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise UnsupportedOperation(
                    f"a second derivative (create_graph=True) of {what} has no rule; torch's operators have: gather() "
                    "the tensors first, make sparse ones dense, or use a grid of one rank"
                )
            return backward(ctx, *gradients)

        return checked

    return mark


def differentiable_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Gradients of ``function(*inputs)`` for the dL/dy ``gradient``, of those inputs that are ``needed``.

    They depend on ``inputs`` and ``gradient`` as autograd records it, so that they can be differentiated. Where a fast
    backward pass is asked for that, its function is computed again out of operators that have derivatives. All ranks
    must record alike, those with an empty block as well: what is sent follows from the graph.
    """
    with torch.enable_grad():
        # Views of their own: an input may have been computed from another one.
        given = [t.view_as(t) if t is not None and n else t for t, n in zip(inputs, needed, strict=True)]
        wanted = [t for t, n in zip(given, needed, strict=True) if t is not None and n]
        derivatives = iter(torch.autograd.grad(function(*given), wanted, gradient, create_graph=True))
    return [next(derivatives) if t is not None and n else None for t, n in zip(given, needed, strict=True)]
