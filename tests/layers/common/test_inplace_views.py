"""In-place changes of results that are views in torch reach their source, or raise."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process

SHAPE = (3, 4, 7, 5)


@pytest.mark.ranks(at_least=2)
def test_a_copy_that_cannot_be_put_back_is_not_changed_in_place(comm):
    x = dc.scatter(normal(1, 2, 8, 4), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "is a copy.*Clone", lambda: x.unfold(2, 3, 1).zero_())


VIEWS = {
    "view": lambda y: y.view(3, 4, -1),
    "flatten": lambda y: y.flatten(),
    "reshape": lambda y: y.reshape(3, 2, 2, -1),
    "select": lambda y: y.select(2, 1),
    "one row": lambda y: y[:, :, 3],
    "rows": lambda y: y[:, :, 1:5],
    "squeeze": lambda y: y[:, :1].squeeze(1),
    "expand": lambda y: y[:, :1].expand(SHAPE),
    "unfold": lambda y: y.unfold(2, 3, 2),
    "detach": lambda y: y.flatten(1).detach(),
    "data": lambda y: y.flatten(1).data,
    "a view of a view": lambda y: y.view(3, 4, -1)[:, :, 3:9].transpose(1, 2),
    "what is no view": lambda y: y.transpose(1, 2).reshape(3, -1),
}


MULTI_VIEW_FUNCTIONS = {
    "unbind": lambda y: y.unbind(2)[1],
    "chunk": lambda y: y.chunk(2, 2)[1],
    "split": lambda y: y.flatten(1).split(9, 1)[2],
}


@pytest.mark.parametrize("view", sorted(VIEWS.keys() - {"unfold", "expand", "data", "detach"}))
@pytest.mark.ranks(2, 3, 4)
def test_a_view_and_its_source_change_alternately(comm, view):
    def run(x):
        y = x * 2
        seen, other = VIEWS[view](y), y.flatten(1)
        seen.mul_(3)
        y.sin_()
        seen.add_(1)
        other.mul_(2)
        return (seen * seen).sum() + (y * x).sum() + other.sin().sum()

    for grid in grids(comm, "ch"):
        same_as_one_process(grid, run, normal(*SHAPE))


@pytest.mark.parametrize("view", MULTI_VIEW_FUNCTIONS)
def test_outside_autograd_one_of_several_views_and_its_source_change_alternately(comm, view):
    def change(x):
        seen = MULTI_VIEW_FUNCTIONS[view](x)
        seen.mul_(3)
        x.add_(1)
        return seen

    expected = normal(*SHAPE)
    seen = change(expected)
    for grid in grids(comm, "chw"):
        x = dc.scatter(normal(*SHAPE), grid)
        assert torch.equal(dc.gather(change(x)), seen)
        assert torch.equal(dc.gather(x), expected)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("view", ["unbind", "chunk"])
def test_one_of_several_views_is_not_changed_in_place_while_autograd_records(comm, view):
    for grid in grids(comm, "hw"):
        y = dc.scatter(normal(*SHAPE), grid).requires_grad_() * 1
        with pytest.raises(RuntimeError, match=r"(do|does) not (allow|let)"):
            MULTI_VIEW_FUNCTIONS[view](y).mul_(2)


def test_views_follow_in_inference_mode_and_of_a_leaf_that_an_optimizer_changes(comm):
    for grid in grids(comm, "chw"):
        with torch.inference_mode():
            y = dc.scatter(normal(*SHAPE), grid) * 1
            seen = y.flatten(1)
            y.relu_()
            assert torch.equal(dc.gather(seen), normal(*SHAPE).relu().flatten(1))
        x = dc.scatter(normal(*SHAPE), grid).requires_grad_()
        seen = x.flatten(1)
        with torch.no_grad():
            x.mul_(2)
        (seen * seen).sum().backward()
        assert torch.equal(dc.gather(x.grad), 4 * normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
def test_a_view_whose_source_has_got_another_shape_in_place_raises(comm):
    y = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size)) * 1
    seen = y.select(2, 1)
    y.unsqueeze_(0)
    y.relu_()
    raises_everywhere(comm, dc.UnsupportedOperation, "shape of its source was changed in place", lambda: seen * 1)
