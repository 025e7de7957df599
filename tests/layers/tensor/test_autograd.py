"""``torch.autograd.grad`` and ``torch.autograd.backward`` of distributed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal

PLAIN = normal(5, 3, 6, 4)


def _leaf(comm: Any, axis: str) -> dc.DistTensor:
    return dc.scatter(PLAIN, grid_over(comm, **{axis: comm.size})).requires_grad_()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("axis", ["n", "c", "h"])
def test_several_tensors_go_back_at_once(comm: Any, axis: str) -> None:
    x, weight = _leaf(comm, axis), torch.ones((), dtype=torch.float64, requires_grad=True)
    y = x * weight
    torch.autograd.backward([y, (y**2).sum()], [normal(5, 3, 6, 4, seed=1), None], inputs=[x, weight])
    plain, one = PLAIN.clone().requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    z = plain * one
    torch.autograd.backward([z, (z**2).sum()], [normal(5, 3, 6, 4, seed=1), None], inputs=[plain, one])
    torch.testing.assert_close(dc.gather(x.grad), plain.grad)
    torch.testing.assert_close(weight.grad, one.grad)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("axis", ["n", "c", "h"])
def test_gradients_are_split_as_what_they_belong_to(comm: Any, axis: str) -> None:
    x = _leaf(comm, axis)
    (dx,) = torch.autograd.grad((x**3).sum(), x)
    assert dx.dist == x.dist
    torch.testing.assert_close(dc.gather(dx), 3 * PLAIN**2)


@pytest.mark.ranks(2)
def test_gradients_are_batched_as_in_torch(comm: Any) -> None:
    x, seeds = _leaf(comm, "h"), torch.stack([PLAIN, PLAIN * 2])
    (dx,) = torch.autograd.grad(x * x, x, seeds, is_grads_batched=True)
    torch.testing.assert_close(dc.gather(dx), 2 * PLAIN * seeds)


def test_inputs_that_took_no_part_have_no_gradient(comm: Any) -> None:
    x, unused, plain = _leaf(comm, "h"), _leaf(comm, "h"), torch.zeros(2, requires_grad=True)
    dx, none, other = torch.autograd.grad((x**3).sum(), [x, unused, plain], allow_unused=True)
    assert none is None and other is None
    torch.testing.assert_close(dc.gather(dx), 3 * PLAIN**2)
    zeros = torch.autograd.grad((x**3).sum(), [unused], materialize_grads=True)[0]
    assert zeros.dist == unused.dist and not dc.gather(zeros).any()
