"""Slices, chunks, flips, rolls, windows and triangles, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

CHUNK_FUNCTIONS = {
    "narrow": lambda x: x.narrow(2, 3, 3),
    "narrow with a negative start": lambda x: torch.narrow(x, -1, -3, 2),
    "select": lambda x: x.select(2, -2) + torch.select(x, 2, 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "chunk of rows": lambda x: torch.cat(x.chunk(3, 2)[1:], 2),
    "split": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split([3, 3, 1], 2))], 2),
    "split into one": lambda x: torch.split(x, 7, 2)[0] * 2,
    "tensor_split at a tensor": lambda x: torch.cat(x.tensor_split(torch.tensor([1, 4]), 2)[::-1], 2),
    "tensor_split that overlaps": lambda x: torch.cat(x.tensor_split((5, 2), 2)[::-1], 2),
    "tensor_split": lambda x: torch.cat(x.tensor_split(3, 2)[::-1], 2),
    "hsplit": lambda x: torch.hsplit(x, 2)[1],
    "vsplit": lambda x: x.vsplit(3)[1],
    "dsplit": lambda x: torch.dsplit(x, [2, 3])[2],
    "unbind": lambda x: torch.cat(x.unbind(2)[::2], 1),
    "unbind and stack": lambda x: torch.stack(torch.unbind(x, 1)[1:], 0),
    "iteration": lambda x: sum(row * (i + 1) for i, row in enumerate(x)),
    "diff": lambda x: x.diff(dim=2),
    "diff twice": lambda x: torch.diff(x, 2, 1),
    "diff with an end": lambda x: torch.diff(x, dim=-1, prepend=x[..., :1]),
    "diff with both ends": lambda x: torch.diff(x, 2, 0, prepend=x[:1], append=x[:2] * 2),
    "diff of order 0 with an end": lambda x: torch.diff(x, 0, 1, append=x[:, :2]),
    "diff of more than there is": lambda x: torch.diff(x, 9, 2, prepend=x[:, :, :1]),
    "flip": lambda x: x.flip(2),
    "flip of several": lambda x: torch.flip(x, dims=(0, -1, 1)),
    "fliplr": lambda x: x.fliplr() + torch.flipud(x),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "rot90 backwards": lambda x: torch.rot90(x, -1, (1, 2)),
    "rot90 twice": lambda x: x.rot90(2, [2, 3]),
    "roll": lambda x: x.roll(2, 2),
    "roll of several": lambda x: torch.roll(x, (3, -1), (1, -1)),
    "roll of all": lambda x: torch.roll(x, 5),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "unfold of several": lambda x: x.unfold(1, 2, 1).unfold(3, 3, 3),
    "unfold with gaps": lambda x: x.unfold(2, 1, 4),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, -2),
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


def test_quarter_turns_and_differences_equal_one_process(comm):
    for grid in grids(comm, "nc"):
        for turns in range(-1, 4):
            same_as_one_process(grid, lambda x, k=turns: torch.rot90(x, k), normal(5, 4))
        for order in (1, 2):
            for dim in (0, 1):
                same_as_one_process(grid, lambda x, n=order, d=dim: torch.diff(x, n, d), normal(5, 4))
        flags = normal(5, 4) > 0
        assert torch.equal(dc.gather(torch.diff(dc.scatter(flags, grid))), torch.diff(flags))
