"""Rounding: results and gradients over ranks are those of float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import whole

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


SHAPE = (3, 6, 7, 9)


def with_exact_operands(function: Callable[..., Any], *plain: torch.Tensor) -> Callable[[Any], Any]:
    """Return ``function(x, *plain)`` with plain tensors in the dtype of x, whose values are exact in all dtypes."""
    return lambda x: function(x, *(t.bfloat16().to(x.dtype) for t in plain))


def error_bound(exact: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the permitted error of a result: one rounding, or the error of torch's ``own`` result in one process.

    float32 is summed in another order.
    """
    size = exact.abs() / 2 + 0.01 * exact.abs().max() if own.dtype != torch.float32 else 8 * exact.abs().max()
    return torch.maximum(torch.finfo(own.dtype).eps * size, 1.1 * (own.double() - exact).abs().max())


def value_and_gradient(function: Callable[[Any], Any], x: Any, differentiable: bool) -> tuple[torch.Tensor, ...]:
    """Return the result, and the gradient of x if it has one, for an output gradient that is exact in all dtypes."""
    x = x.detach().requires_grad_()
    y = function(x)
    if not differentiable:
        return (whole(y),)
    gradient = normal(*y.shape, seed=4).bfloat16().to(y.dtype)
    given = dc.scatter(gradient, y.dist) if isinstance(y, dc.DistTensor) else gradient
    return whole(y), whole(torch.autograd.grad(y, x, given)[0])


def check_rounded_once(
    comm: Any, function: Callable[[Any], Any], roundings: int = 1, differentiable: bool = True
) -> None:
    """Compare the result, and the gradient, of each dtype with float64 in one process.

    ``roundings``: more than one if torch's kernel rounds partial sums on each rank before ranks add them.
    """
    for dtype in FLOATS:
        x = (normal(*SHAPE) + 1).to(dtype)
        exact, own = (value_and_gradient(function, t, differentiable) for t in (x.double(), x))
        for axis in "nch":
            split = value_and_gradient(function, dc.scatter(x, grid_over(comm, **{axis: comm.size})), differentiable)
            values = zip(split, own, exact, strict=True)
            for what, (found, alone, wanted) in zip(("y", "dx"), values, strict=False):
                assert found.dtype == dtype
                off = (found.double() - wanted).abs() - (roundings + (what == "dx")) * error_bound(wanted, alone)
                assert (off <= 0).all(), f"{what} in {dtype} over {axis}: {off.max()} too far of {wanted.abs().max()}"
