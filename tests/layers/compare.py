"""Comparison of a distributed operator with one process: the result, and the gradients of all operands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.memory_format import memory_format
from tests.distconv.layouts import normal

UP_TO_SIX_RANKS = pytest.mark.ranks(at_most=6)
"""For tests of many options: eight ranks on two cores take long and add no case."""

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check values, shape and dtype."""
    torch.testing.assert_close(found, expected, **TOLERANCE, equal_nan=True, msg=lambda text: f"{what}: {text}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of ``tensor``, and check that the shape of its block fits its distribution."""
    if isinstance(tensor, dc.DistTensor):
        assert tuple(tensor.local.shape) == tensor.dist.local_shape(tensor.shape), tensor
        return dc.gather(dc.DistTensor(tensor.local.detach(), tensor.dist, tensor.shape))
    return tensor.detach()


def check_same_gradient(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that ``found`` has the gradient of ``expected``, distributed as itself, or no gradient if that has none."""
    assert (found.grad is None) == (expected.grad is None), f"{what}: {found.grad} instead of {expected.grad}"
    if found.grad is None or expected.grad is None:
        return
    close(whole(found.grad), expected.grad, what)
    if isinstance(found, dc.DistTensor):
        assert isinstance(found.grad, dc.DistTensor), what
        assert found.grad.dist == found.dist, what


def check_block_format(tensor: dc.DistTensor, what: str) -> None:
    """Check that the block of a channels-last tensor, unless it is a view, lies in memory as the tensor says."""
    stated = memory_format(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))
    if stated is not torch.contiguous_format and tensor.local.numel() and tensor._view is None:
        assert memory_format(tensor.local) in (stated, memory_format(torch.empty_like(tensor.local))), what


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires a gradient if its dtype permits one."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def same_as_one_process(
    target: dc.ProcessGrid | dc.Distribution,
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    plain: Sequence[torch.Tensor] = (),
    dims: Sequence[Any] | None = None,
) -> dc.DistTensor:
    """Call ``function(*tensors, *plain)`` in one process and with ``tensors`` split; compare results and gradients.

    Also compare the operands after the call, and ``requires_grad`` of the result. Its strides must be those of one
    process or of contiguous memory. ``dims`` has the grid axes that split each of ``tensors``. Return the distributed
    result.
    """
    leaves = [leaf(t) for t in (*tensors, *plain)]
    y = function(*leaves)
    split = [
        dc.scatter(t.detach().clone(), target, dims=None if dims is None else dims[i]).requires_grad_(
            t.is_floating_point()
        )
        for i, t in enumerate(tensors)
    ]
    plain_leaves = [leaf(t) for t in plain]
    found = function(*split, *plain_leaves)
    close(whole(found), y.detach(), f"y on {target}")
    assert found.requires_grad == y.requires_grad, f"y on {target}"
    orders = y.stride(), torch.empty(y.shape, device="meta").stride()
    assert found.stride() in orders, f"y on {target}: strides {found.stride()}, which are neither of {orders}"
    check_block_format(found, f"y on {target}")
    for number, (one, expected) in enumerate(zip([*split, *plain_leaves], leaves, strict=True)):
        close(whole(one), expected.detach(), f"input {number} after the call on {target}")
    if y.requires_grad:
        gradient = normal(*y.shape, seed=17).to(y)
        y.backward(gradient)
        found.backward(gradient)
        for number, (one, expected) in enumerate(zip([*split, *plain_leaves], leaves, strict=True)):
            check_same_gradient(one, expected, f"gradient of input {number} on {target}")
    return found


def check_module_same_as_one_process(
    target: dc.ProcessGrid | dc.Distribution, module: torch.nn.Module, *tensors: torch.Tensor
) -> dc.DistTensor:
    """Compare a module as :func:`same_as_one_process` does, with its parameters' gradients and its buffers."""
    distributed_module = copy.deepcopy(module)
    found = same_as_one_process(target, _Alternating(module, distributed_module), *tensors)
    for (name, expected), other in zip(module.named_parameters(), distributed_module.parameters(), strict=True):
        check_same_gradient(other, expected, f"dL/d{name} on {target}")
    for (name, buffer), other in zip(module.named_buffers(), distributed_module.buffers(), strict=True):
        close(other, buffer, f"{name} on {target}")
    module.zero_grad()
    return found


class _Alternating:
    """A callable that calls the first module for plain tensors and the second for DistTensors."""

    def __init__(self, plain: torch.nn.Module, distributed: torch.nn.Module) -> None:
        self._plain, self._distributed = plain, distributed

    def __call__(self, *tensors: torch.Tensor) -> Any:
        chosen = self._distributed if isinstance(tensors[0], dc.DistTensor) else self._plain
        return chosen(*tensors)


def built(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a module in float64 with the same parameters on all ranks."""
    torch.manual_seed(5)
    return make().double()


def values_plus_indices(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return values and indices as one tensor."""
    return found[0] + found[1].double()
