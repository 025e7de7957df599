"""Views: merging, splitting, reordering and repeating dimensions, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import counting, grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

SHAPES = {
    "view_as": lambda x: x.view_as(torch.empty(12, 35)),
    "reshape_as": lambda x: x.reshape_as(x.permute(1, 0, 3, 2)),
    "reshape that joins samples": lambda x: x.reshape(-1, 7, 5),
    "reshape that parts channels": lambda x: x.view(3, 2, 2, 7, 5),
    "extents of one": lambda x: x.view(3, 1, 4, 1, 7, 5, 1),
    "squeeze of a split extent of one": lambda x: x[:, :, 3:4].squeeze(2),
    "flatten of a permuted one": lambda x: x.permute(0, 3, 1, 2).flatten(1, 2),
    "transposition in place": lambda x: (x * 2).transpose_(1, 3).add_(1) + (x * 1).swapaxes_(1, -1),
    "t in place": lambda x: (x[0, 0] * 2).t_().mul_(x[1, 1].t()),
    "atleast": lambda x: torch.atleast_3d(x[0, 0]) * torch.atleast_2d(x[0, 0, 0])[0, 0],
    "repeat by a dimension": lambda x: x.repeat(2, 1, 1, 1, 1),
    "repeat_interleave by numbers": lambda x: x.repeat_interleave(torch.tensor([1, 0, 3, 2]), dim=1),
    "sum_to_size": lambda x: x.sum_to_size(1, 4, 1, 5) + x.sum_to_size(7, 1)[:1],
    "channel shuffle": lambda x: x.view(3, 2, 2, 7, 5).transpose(1, 2).reshape(3, 4, 7, 5),
    "pixel shuffle": lambda x: x.view(3, 1, 2, 2, 7, 5).permute(0, 1, 4, 2, 5, 3).reshape(3, 1, 14, 10),
    "patches": lambda x: x[:, :, :6, :4].reshape(3, 4, 3, 2, 2, 2).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2),
}


@pytest.mark.parametrize("name", SHAPES)
@UP_TO_FOUR_RANKS
def test_shaping_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, SHAPES[name], normal(*SHAPE))


def test_merged_dimensions_keep_the_split_of_the_first(comm):
    x = dc.scatter(normal(3, 7, 2, 3), grid_over(comm, c=comm.size))
    y = x.flatten(1)
    assert y.dist.axes == ("n", "c")
    assert y.local.shape[1] == 6 * x.local.shape[1]
    assert dc.scatter(normal(3, 7, 1, 1), grid_over(comm, c=comm.size)).flatten(1).dist.boundaries == {}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [(3, 20), (3, 4, 5), (12, 5), (3, 2, 2, 5), (60,)])
def test_equal_blocks_amid_others_are_dealt_out_and_put_together_again(comm, shape):
    """(3, 4, 5) with the 4 split: flat elements come in periods of 20, of which each rank has equal blocks."""
    x = dc.scatter(counting(3, 4, 5), grid_over(comm, h=comm.size), dims=(None, "h", None))
    with count_traffic() as traffic:
        y = x.reshape(shape)
        z = y.reshape(3, 4, 5)
    assert torch.equal(y.gather(), counting(3, 4, 5).reshape(shape)) and torch.equal(z.gather(), counting(3, 4, 5))
    if (comm.size, shape) != (4, (3, 2, 2, 5)):  # there four parts would split two dimensions of two
        assert not sum(traffic.sent.values()) and z.dist == x.dist


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("shape", [(3, 6, 4), (4, 5, 3), (2, 1, 12)])
def test_dimensions_that_merge_after_others_equals_one_process(comm, shape):
    for dims in ((None, "h", None), (None, None, "h")):
        for merged in ((-1, shape[2]), (shape[0], -1), (-1,), (shape[0] * shape[1] * shape[2] // 2, 2)):
            function = lambda x, merged=merged: (x.reshape(merged) * 3).reshape(shape).transpose(0, 2)  # noqa: E731
            same_as_one_process(grid_over(comm, h=comm.size), function, normal(*shape), dims=[dims])


def test_where_one_process_copies_the_result_shares_no_memory(comm):
    """On each rank the transposed block (1, 3, 4) could be viewed as (3, 4), but not the full tensor."""
    x = dc.scatter(normal(2, 3, 4), grid_over(comm, n=comm.size))
    y = x.transpose(0, 1).reshape(6, 4)
    y.zero_()
    assert torch.equal(x.gather(), normal(2, 3, 4)) and not y.gather().any()


def test_a_parted_dimension_stays_split_in_whole_parts(comm):
    size = comm.size
    x = dc.scatter(normal(1, 2, 2 * size + 2, 3), grid_over(comm, h=size))
    y = x.view(1, 2, size + 1, 2, 3)
    assert y.dist.axes == ("n", "c", "h", None, "w")
    assert torch.equal(dc.gather(y), normal(1, 2, 2 * size + 2, 3).view(1, 2, size + 1, 2, 3))


@pytest.mark.parametrize("axis", ["h", "w", "c"])
def test_dimensions_change_places_in_place(comm, axis):
    def turned(x):
        y = x * 2
        y.transpose_(1, 2)
        strides = y.stride()
        y.swapaxes_(0, 3).unsqueeze_(1).squeeze_(1).swapdims_(1, 2)
        assert strides == (140, 5, 35, 1) and y.stride() == (1, 35, 5, 140)
        return y * x.permute(3, 2, 1, 0).transpose(1, 2) + y[:, :2, 1:3, 0].select(0, 2).clone().t_().sum()

    same_as_one_process(grid_over(comm, **{axis: comm.size}), turned, normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda x: x[:, :, :1].squeeze_(2), r"x = x.squeeze\(...\)"),
        (lambda x: x.flatten(1).transpose_(0, 1), r"x = x.transpose\(...\)"),
        (lambda x: x.view(torch.int64), r"\.to\(dtype\)"),
    ],
)
def test_what_cannot_be_done_in_place_names_a_fix(comm, call, way_out):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, way_out, lambda: call(x))


def test_a_view_of_the_wrong_size_raises_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(
        comm, dc.ShapeError, r"shape '\[5, 5\]' is invalid for input of size 420", lambda: x.reshape(5, 5)
    )


def test_a_dimension_out_of_range_raises_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    for call in (lambda: x.permute(0, 1, 2, 4), lambda: x.transpose(1, 5), lambda: x.squeeze(4), lambda: x.flip(-5)):
        raises_everywhere(comm, IndexError, r"Dimension out of range \(expected to be in range of \[-4, 3\]", call)
