"""``as_strided``: the same as in one process, or an error if the memory order is not defined."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

pytestmark = [
    pytest.mark.usefixtures("fallback"),
    pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning"),
]


def windows(x):
    """All windows of 2 x 2, as libraries take them that know nothing of ``unfold``."""
    n, c, h, w = x.shape
    taken = x.as_strided((n, c, h - 1, w - 1, 2, 2), (*x.stride(), *x.stride()[2:]))
    return taken * torch.as_strided(x * 2, (2, 2), (1, 0), 3)


@pytest.mark.parametrize("axis", "nchw")
def test_windows_and_their_gradients_are_those_of_one_process(comm, axis):
    plain = normal(3, 2, 5, 4).requires_grad_()
    x = dc.scatter(plain.detach(), grid_over(comm, **{axis: comm.size})).requires_grad_()
    expected, found = windows(plain), windows(x)
    (expected**2).sum().backward()
    (found**2).sum().backward()
    torch.testing.assert_close(dc.gather(found), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(dc.gather(x.grad), plain.grad, rtol=1e-13, atol=1e-13)


def test_a_change_of_the_windows_changes_the_tensor(comm):
    plain = normal(3, 4)
    x = dc.scatter(plain, grid_over(comm, w=comm.size), dims=(None, "w"))
    for tensor in (plain, x):
        tensor.as_strided((3,), (5,)).fill_(7.0)
    assert torch.equal(dc.gather(x), plain)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: x.t().as_strided((2,), (1,)), "not in one order"),
        (lambda x: x[1:].as_strided((2,), (1,), 0), "leave it out, or clone"),
        (lambda x: x[:2].as_strided((3, 4), (4, 1)), "it reaches element 11 of 8"),
    ],
)
def test_an_undefined_memory_order_raises(comm, call, reason):
    x = dc.scatter(normal(3, 4), grid_over(comm, w=comm.size), dims=(None, "w"))
    raises_everywhere(comm, dc.UnsupportedOperation, reason, lambda: call(x))
