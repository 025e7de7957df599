"""Operands of different layouts and extents, and the shapes and refusals that torch itself gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import same_as_one_process

SHAPE = (3, 2, 7, 4)


@pytest.mark.parametrize("other", [SHAPE, (1, 2, 7, 4), (3, 2, 1, 1), (1, 1, 7, 1), (3, 1, 1, 4)])
def test_split_operands_of_different_extents_are_aligned(comm, other):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda a, b: a * b - b, normal(*SHAPE), normal(*other, seed=1))
        same_as_one_process(grid, lambda a, b: b / (1 + a * a), normal(*SHAPE), normal(*other, seed=1))


def test_operands_of_any_two_layouts_are_aligned(comm):
    shape = (5, 7, 3)
    a, b = normal(*shape), normal(*shape, seed=1)
    for one in twenty_layouts(comm, shape)[::3]:
        for other in twenty_layouts(comm, shape)[::4]:
            x, y = (dc.scatter(t.clone(), d).requires_grad_() for t, d in ((a, one), (b, other)))
            (x * y).sum().backward()
            assert torch.equal(dc.gather(x.grad), b), (one, other)
            assert torch.equal(dc.gather(y.grad), a), (one, other)


def test_a_tensor_of_one_split_element_broadcasts(comm):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda a, b: a + b, normal(1, 1, 1, 1), normal(*SHAPE, seed=1))


def test_shapes_that_do_not_broadcast_are_refused_in_torchs_words(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    match = r"size of tensor a \(4\) must match the size of tensor b \(5\)"
    with pytest.raises(RuntimeError, match=match):
        normal(*SHAPE) + normal(5)
    raises_everywhere(comm, dc.ShapeError, match, lambda: x + normal(5))


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 2, 2)),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_max_pool3d(x.unsqueeze(2), (1, 2, 1)),
        lambda x: F.interpolate(x, size=(5, 3), mode="area"),
        lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
        lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2)),
        lambda x: F.cross_entropy(x, torch.zeros(1, 3, 4).long()),
        lambda x: F.group_norm(x, 2),
        lambda x: F.dropout2d(x),
    ],
)
def test_under_autocast_every_rank_has_the_dtype_of_one_process(comm, call):
    x = normal(1, 2, 3, 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        expected = call(x.bfloat16())
        for grid in grids(comm, "ch"):
            torch.manual_seed(0)
            y = call(dc.scatter(x.bfloat16(), grid))
            assert y.dtype == y.local.dtype == expected.dtype
            torch.testing.assert_close(dc.gather(y), expected, rtol=1e-2, atol=1e-2)
