"""Backward passes that have no derivative of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from distconv.errors import UnsupportedOperation


def first_order(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
