"""Indexing and assignment, against one process, and changes of views that must reach their source."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

ITEMS = {
    "slice that holds nothing": lambda x: x[:, 1::2, 5:2],
    "slice beyond the end": lambda x: x[:, :, 5:100],
    "negative list": lambda x: x[:, :, [-1, 0, -7]],
    "range": lambda x: x[:, range(1, 3)],
    "empty list": lambda x: x[:, []],
    "tensor of one number": lambda x: x[..., torch.tensor(3)],
    "lists apart": lambda x: x[[0, 2], :, [1, 5]],
    "lists among slices": lambda x: x[:, [0, 1], 1:6:2, None, 2],
    "list of slices": lambda x: x[[slice(None), slice(1, 3), slice(2, 6)]],
    "list of lists": lambda x: x[[[0, 2], [1, 3]]],
    "list of tensors": lambda x: x[[torch.tensor([0, 2]), torch.tensor([1, 3])]],
    "list with dots and None": lambda x: x[[None, 1, ..., 2]],
    "dots twice": lambda x: x[..., 0, ...],
    "dots twice after a number": lambda x: x[0, ..., 0, ...],
    "dots and nothing else, twice": lambda x: x[..., ...],
    "dots for nothing, twice": lambda x: x[0, ..., 1:, ..., 2:, 0],
    "distributed index": lambda x: x[:, (x[0, :, 0, 0].detach() * 0).long()],
}


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # torch's: lists in place of tuples
@UP_TO_FOUR_RANKS
def test_indexing_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, ITEMS[name], normal(*SHAPE))


def test_a_plain_table_is_indexed_by_distributed_numbers(comm):
    numbers = (normal(*SHAPE).abs() * 3).long().clamp(max=5)
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda i, table: table[i] * 2, numbers, plain=(normal(6, 2, 3),))


def test_a_slice_moves_nothing(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    y = x[:, :, 1:6]
    assert y.dist.split == x.dist.split
    if y.local.numel():
        assert y.local.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()


ASSIGNMENTS = {
    "number": ((slice(None), 0), 3.0),
    "slice": ((slice(None), slice(None), slice(1, 5, 2)), 1.5),
    "nothing": ((slice(None), slice(None), slice(4, 4)), 1.0),
    "one element": ((2, 3, 6, 4), 7.0),
    "tensor": ((slice(None), slice(None), 2), normal(4, 5)),
    "whole": (slice(None), normal(*SHAPE)),
    "dots": ((Ellipsis, -1), normal(3, 1, 7)),
    "None": ((0, None, slice(None), 1), normal(1, 4, 1)),
    "part": ((slice(1, None), slice(None), slice(2, 6), slice(0, 3)), normal(2, 4, 4, 3)),
    "surplus dimensions": ((slice(None), 1), normal(1, 1, 3, 7, 5)),
    "tensor of one number": ((slice(None), slice(None), 3), torch.tensor(2.0).double()),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@UP_TO_FOUR_RANKS
def test_assignment_equals_one_process(comm, name):
    index, value = ASSIGNMENTS[name]

    def assign(x, value=value):
        y = x * 2
        y[index] = value
        return y * y

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, assign, normal(*SHAPE), plain=(value,) if isinstance(value, torch.Tensor) else ())


def test_what_a_tensor_gives_to_a_part_of_itself_is_read_before_it_is_written(comm):
    """torch rejects it if both share an element; within blocks no element may be read twice."""
    for dist in uneven_layouts(comm, SHAPE):
        x = dc.scatter(normal(*SHAPE), dist)
        x[:, :, 1:] = x[:, :, :-1]
        expected = normal(*SHAPE)
        expected[:, :, 1:] = expected[:, :, :-1].clone()
        assert torch.equal(x.gather(), expected), dist


def test_assignment_of_a_distributed_tensor(comm):
    def assign(x, v):
        y = x * 2
        y[:, 1:3] = v[:, :2] * v[:, 2:]
        return y * y

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, assign, normal(*SHAPE), normal(*SHAPE, seed=1))


def test_assignment_under_a_mask(comm):
    def assign(x, v):
        y = x * 2
        y[y > 0.3] = v
        y[torch.tensor([True, False, True])] = 1.0
        return y * x

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, assign, normal(*SHAPE), plain=(torch.tensor(0.7).double(),))


@pytest.mark.parametrize("mask", [True, (torch.tensor([True, False, True]), 0)], ids=str)
def test_indexing_by_a_mask_and_more_raises(comm, mask):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "one after the other, or torch.where", lambda: x[mask])


def test_assignments_without_a_rule_name_a_fix(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))

    def several():
        x[x > 0] = x.flatten()

    def by_list():
        x[[0, 1]] = 1.0

    def into_plain():
        normal(*SHAPE)[:, 0] = x[:, 0]

    for call in (several, by_list, into_plain):
        raises_everywhere(comm, dc.UnsupportedOperation, r"use |or gather first", call)


@pytest.mark.parametrize(
    "index", [(0, 0, 7), (0, 0, 0, 0, 0), (slice(None), [0, 4]), (slice(None), 9), (..., 0, ..., 0)], ids=str
)
def test_an_index_out_of_bounds_raises_torchs_error(comm, index):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, IndexError, "out of bounds|out of range|too many", lambda: x[index])


def test_a_value_of_the_wrong_shape_raises_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))

    def assign():
        x[:, :, 0] = normal(3)

    raises_everywhere(
        comm, dc.ShapeError, r"expanded size of the tensor \(5\) must match the existing size \(3\)", assign
    )


def test_a_copy_that_stands_for_a_view_follows_what_is_assigned_to_its_source(comm):
    def run(x):
        y = x * 1
        row = y[1]  # a copy on the ranks that do not have it
        y[0:2] = 5.0
        before = row.clone()
        y[1, 1:] = torch.arange(2.0).double()
        return torch.stack([before, row.clone()])

    with torch.no_grad():
        expected = run(normal(4, 3))
        assert torch.equal(dc.gather(run(dc.scatter(normal(4, 3), grid_over(comm, n=comm.size)))), expected)
