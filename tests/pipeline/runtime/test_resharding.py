"""Routes between the grids of two stages, by brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from distconv.arrangement import Arrangement
from distconv.pipeline.runtime.resharding import blocks, extents, routes, to_boundary, within
from tests.distconv.layouts import normal

GRIDS = (
    {},
    {"n": 2},
    {"c": 3},
    {"h": 2, "w": 2},
    {"n": 2, "h": 3},
    {"d": 2},
    {"n": 5},
    {"c": 2, "w": 4},
    {"r": 2, "h": 2},
)
SHAPES = ((), (5,), (1, 7), (4, 3), (2, 3, 5), (3, 2, 7, 4), (2, 2, 1, 1), (0, 3, 4, 4), (2, 3, 4, 5, 6))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_block_is_filled_once_with_what_its_sources_hold(shape):
    whole = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float64)[: torch.Size(shape).numel()].view(
        shape
    )
    for source, target in itertools.product(map(grid, GRIDS), repeat=2):
        held = [whole[index(box)] for box in blocks(source, shape)]
        for rank, own in enumerate(blocks(target, shape)):
            filled = torch.full([interval.extent for interval in own], -1.0, dtype=torch.float64)
            for route in routes(source, target, shape):
                if route.target == rank:
                    piece = held[route.source][within(route.box, blocks(source, shape)[route.source])]
                    place = filled[within(route.box, own)]
                    assert (place == -1).all()
                    place.copy_(piece)
            assert torch.equal(filled, whole[index(own)]), (source, target, rank)


def grid(axes):
    return extents(Arrangement(**axes))


def index(box):
    return tuple(slice(interval.start, interval.stop) for interval in box)


def test_ranks_that_hold_the_same_block_take_targets_in_turn():
    found = routes(grid({"h": 3}), grid({"n": 2, "h": 3}), (4, 5))
    assert sorted(route.source for route in found) == [0, 0, 1, 1, 2, 2]


def test_one_rank_and_one_rank_exchange_all_in_one_piece():
    (route,) = routes((), (), (3, 4))
    assert (route.source, route.target) == (0, 0)
    assert blocks((), (3, 4)) == (route.box,)


def test_without_a_grid_a_value_crosses_as_it_is():
    x = normal(2, 3)
    assert to_boundary(x, None) is x
