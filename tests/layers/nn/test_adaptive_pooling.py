"""Adaptive pooling: windows that divide the input into a given number of parts, against one process."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, grids, normal
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process


@pytest.mark.parametrize("size", [1, (1, 3), (9, 1), 4, (7, 2), (None, 3), (9, 7)])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@UP_TO_SIX_RANKS
def test_adaptive_pooling_equals_one_process(comm, pool, size):
    for grid in grids(comm, "nch"):
        same_as_one_process(grid, lambda x: pool(x, size), normal(3, 2, 7, 9))
        same_as_one_process(grid, lambda x: pool(x, size), normal(1, 2, 8, 6).round())


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_what_global_pooling_shrinks_is_replicated_from_then_on(comm, pool):
    for grid in grids(comm, "hw"):
        y = same_as_one_process(grid, lambda x: pool(x, 1), normal(3, 2, 7, 9))
        assert not y.dist.split_axes


@pytest.mark.ranks(at_least=2)
def test_adaptive_pooling_moves_only_what_a_rank_lacks_of_its_windows(comm):
    x = dc.scatter(normal(1, 1, 40 * comm.size + 1, 3), grid_over(comm, h=comm.size))
    with count_traffic() as traffic:
        for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
            pool(x, (10 * comm.size, 3))
    assert sum(traffic.sent.values()) <= 2 * 2 * 5 * 3 * 8
