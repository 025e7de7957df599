"""Slices, chunks, flips, rolls, windows and triangles, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

CHUNK_FUNCTIONS = {
    "split into one": lambda x: torch.split(x, 7, 2)[0] * 2,
    "tensor_split at a tensor": lambda x: torch.cat(x.tensor_split(torch.tensor([1, 4]), 2)[::-1], 2),
    "tensor_split that overlaps": lambda x: torch.cat(x.tensor_split((5, 2), 2)[::-1], 2),
    "unbind and stack": lambda x: torch.stack(torch.unbind(x, 1)[1:], 0),
    "diff of more than there is": lambda x: torch.diff(x, 9, 2, prepend=x[:, :, :1]),
    "roll of all": lambda x: torch.roll(x, 5),
    "unfold of several": lambda x: x.unfold(1, 2, 1).unfold(3, 3, 3),
    "unfold with gaps": lambda x: x.unfold(2, 1, 4),
    "center crop": lambda x: torch.cat([x[:, :, 1:6, 1:4], x[:, :, 2:, 2:]], 1) * 2,
}


@pytest.mark.parametrize("name", CHUNK_FUNCTIONS)
@UP_TO_FOUR_RANKS
def test_chunks_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, CHUNK_FUNCTIONS[name], normal(*SHAPE))


def test_windows_of_a_split_dimension_are_split(comm):
    x = dc.scatter(normal(1, 2, 9, 4), grid_over(comm, h=comm.size))
    patches = x.unfold(2, 3, 3)
    assert patches.dist.axes[2] == "h"
    assert patches.local.shape[2] == len(range(comm.rank, 3, comm.size)) if comm.size >= 3 else True


def test_pieces_that_do_not_fit_raise_torchs_error(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, RuntimeError, "split_sizes", lambda: x.split([3, 3], 2))
    raises_everywhere(comm, dc.ShapeError, "exceeds dimension size", lambda: x.narrow(2, 5, 3))
    raises_everywhere(comm, dc.ShapeError, "maximum size for tensor at dimension 2 is 7", lambda: x.unfold(2, 8, 1))


def test_places_to_split_at_may_be_distributed(comm):
    grid = grid_over(comm, h=comm.size)
    places = dc.scatter(torch.tensor([2, 5]), grid, dims="h")
    for tensor in (normal(*SHAPE), dc.scatter(normal(*SHAPE), grid)):
        for found, expected in zip(
            torch.tensor_split(tensor, places, 2), normal(*SHAPE).tensor_split((2, 5), 2), strict=True
        ):
            assert torch.equal(dc.gather(found), expected)
