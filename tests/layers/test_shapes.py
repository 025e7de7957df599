"""Reductions, reshaping, slicing, joining and linear layers against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.core.layouts import counting, grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, built, module_as_in_one_process, same_as_one_process

SHAPE = (3, 2, 7, 4)


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"dim": 0}, {"dim": -1}, {"dim": (2, 3)}, {"dim": (0, 2, 3), "keepdim": True}, {"dim": 1, "keepdim": True}],
    ids=str,
)
@UP_TO_SIX_RANKS
def test_reductions_equal_one_process(comm, name, arguments):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: getattr(x, name)(**arguments), normal(*SHAPE))
        same_as_one_process(grid, lambda x: getattr(torch, name)(x * x, **arguments), normal(1, 2, 2, 9))


def test_reductions_take_positional_arguments(comm):
    for grid in grids(comm, "hw"):
        same_as_one_process(
            grid, lambda x: x.mean((2, 3), True) + x.sum(2, True) + x.sum(-1).mean(2)[:, :, None, None], normal(*SHAPE)
        )


def test_what_a_reduction_shrinks_is_replicated_from_then_on(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    assert x.mean((2, 3)).dist.axes == ("n", "c")
    assert x.sum(2, keepdim=True).dist.axes == ("n", "c", None, "w")


def test_whole_numbers_are_summed_as_such(comm):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: x.sum(), counting(*SHAPE).long())
        same_as_one_process(grid, lambda x: (x > 7).sum((0, 2)), counting(*SHAPE))


def test_a_sum_over_any_layout_counts_each_element_once(comm):
    for dist in twenty_layouts(comm, (5, 7, 3)):
        assert dc.scatter(counting(5, 7, 3), dist).sum().item() == counting(5, 7, 3).sum().item()


SHAPES = {
    "flatten": lambda x: x.flatten(1),
    "view to two dimensions": lambda x: x.view(x.shape[0], -1),
    "reshape of space": lambda x: x.reshape(3, 2, -1),
    "reshape that joins samples": lambda x: x.reshape(-1, 7, 4),
    "reshape that splits": lambda x: x.view(3, 2, 7, 2, 2),
    "unflatten": lambda x: x.unflatten(3, (2, 2)),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
    "squeeze of all": lambda x: x.sum(1, keepdim=True).squeeze(),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute by negative numbers": lambda x: x.permute(-1, 0, -2, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "flatten of a permuted one": lambda x: x.permute(0, 3, 1, 2).flatten(1, 2),
    "index": lambda x: x[1],
    "negative index": lambda x: x[:, :, -1],
    "slices": lambda x: x[:, :, 1:6:2, :-1],
    "slice of samples": lambda x: x[1:],
    "dots and None": lambda x: x[..., None, 1:3],
    "whole slices": lambda x: x[:, :, 0:7, :100],
    "narrow": lambda x: x.narrow(2, 3, 3),
    "narrow from behind": lambda x: x.narrow(-1, -3, 2),
    "chunk": lambda x: torch.cat(x.chunk(2, 3)[::-1], 3),
    "split": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split([3, 3, 1], 2))], 2),
    "softmax over channels": lambda x: x.softmax(1),
    "softmax over space": lambda x: F.softmax(x, -1) * x,
    "log_softmax": lambda x: F.log_softmax(x, dim=2),
}


@pytest.mark.parametrize("name", SHAPES)
@UP_TO_SIX_RANKS
def test_shaping_equals_one_process(comm, name):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, SHAPES[name], normal(*SHAPE))


@pytest.mark.parametrize("name", SHAPES)
@UP_TO_SIX_RANKS
def test_shaping_of_irregular_blocks_equals_one_process(comm, name):
    grid = grid_over(comm, h=comm.size)
    bounds = (0, *sorted((5 * i) % 8 for i in range(1, comm.size)), 7)
    for options in ({"boundaries": {"h": bounds}}, {"cyclic": {"h": 1}}):
        same_as_one_process(dc.Distribution(grid, (None, None, "h", None), **options), SHAPES[name], normal(*SHAPE))


def test_an_unchanged_dimension_stays_split(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, n=comm.size))
    assert x.flatten(1).dist.axes[0] == "n"
    assert x.permute(1, 0, 2, 3).dist.axes[1] == "n"


@pytest.mark.parametrize("index", [[0, 1], torch.tensor([0, 1]), True], ids=str)
def test_indexing_by_lists_or_tensors_is_refused(comm, index):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "gather it first", lambda: x[index])


def test_a_view_of_the_wrong_size_is_refused_in_torchs_words(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(
        comm, dc.ShapeError, r"shape '\[5, 5\]' is invalid for input of size 168", lambda: x.reshape(5, 5)
    )


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_cat_equals_one_process(comm, dim):
    shapes = [list(SHAPE) for _ in range(3)]
    shapes[1][dim], shapes[2][dim] = 1, 5
    parts = [normal(*s, seed=i) for i, s in enumerate(shapes)]
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda *t: torch.cat(t, dim), *parts)
        same_as_one_process(grid, lambda *t: torch.cat(t, dim), *parts[:2], plain=parts[2:])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stack_equals_one_process(comm, dim):
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda *t: torch.stack(t, dim), normal(*SHAPE), normal(*SHAPE, seed=1))


def test_cat_aligns_what_lies_differently(comm):
    shape = (5, 7, 3)
    parts = normal(*shape), normal(*shape, seed=1)
    layouts = twenty_layouts(comm, shape)
    for one, other in zip(layouts, layouts[::-1], strict=True):
        x, y = (dc.scatter(part.clone(), dist).requires_grad_() for part, dist in zip(parts, (one, other), strict=True))
        joined = torch.cat([x, y], 1)
        assert torch.equal(dc.gather(joined), torch.cat(parts, 1)), (one, other)
        joined.backward(counting(5, 14, 3))
        assert torch.equal(dc.gather(x.grad), counting(5, 14, 3)[:, :7])
        assert torch.equal(dc.gather(y.grad), counting(5, 14, 3)[:, 7:])


def test_cat_of_parts_that_do_not_fit_is_refused_in_torchs_words(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, "Sizes of tensors must match", lambda: torch.cat([x, x[:, :, 1:]], 1))


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (9, 5)])
def test_a_linear_layer_equals_one_process(comm, shape):
    for grid in grids(comm, "nh"):
        for bias in (True, False):
            module_as_in_one_process(grid, built(lambda bias=bias: nn.Linear(5, 4, bias)), normal(*shape))


def test_a_linear_layer_on_the_last_of_several_dimensions(comm):
    for grid in grids(comm, "nhw"):
        module = built(lambda: nn.Linear(4, 3))
        module_as_in_one_process(grid, module, normal(*SHAPE))


def test_a_linear_layer_over_features_of_the_wrong_number_is_refused_in_torchs_words(comm):
    x = dc.scatter(normal(3, 6), grid_over(comm, n=comm.size))
    module = built(lambda: nn.Linear(5, 4))
    raises_everywhere(
        comm, dc.ShapeError, r"mat1 and mat2 shapes cannot be multiplied \(3x6 and 5x4\)", lambda: module(x)
    )


def test_pooled_features_into_a_linear_head(comm):
    head = built(lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)))
    for grid in grids(comm, "nhw"):
        module_as_in_one_process(grid, head, normal(*SHAPE))
