"""Adaptive pooling: windows that divide the input into a given number of parts, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication.transport import Exchange
from tests.distconv.layouts import grid_over, grids, normal
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process, values_plus_indices


@pytest.mark.parametrize("size", [1, (1, 3), (9, 1), 4, (7, 2), (None, 3), (9, 7)])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@UP_TO_SIX_RANKS
def test_adaptive_pooling_equals_one_process(comm, pool, size):
    for grid in grids(comm, "nch"):
        same_as_one_process(grid, lambda x: pool(x, size), normal(3, 2, 7, 9))
        same_as_one_process(grid, lambda x: pool(x, size), normal(1, 2, 8, 6).round())


@pytest.mark.parametrize("name", ["avg", "max"])
def test_adaptive_pooling_in_one_and_three_dimensions(comm, name):
    for count, axes in ((1, "nw"), (3, "dhw")):
        pool = getattr(F, f"adaptive_{name}_pool{count}d")
        for size in ((1, 4, 3)[-count:], (2, 1, 5)[-count:]):
            for grid in grids(comm, axes):
                same_as_one_process(grid, lambda x, s=size, pool=pool: pool(x, s), normal(2, 2, *(3, 7, 8)[-count:]))


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_what_global_pooling_shrinks_is_replicated_from_then_on(comm, pool):
    for grid in grids(comm, "hw"):
        y = same_as_one_process(grid, lambda x: pool(x, 1), normal(3, 2, 7, 9))
        assert not y.dist.split_axes


@pytest.mark.ranks(at_least=2)
def test_adaptive_pooling_moves_only_what_a_rank_lacks_of_its_windows(comm, monkeypatch):
    received = []

    def noted(self, comm, sends, receives, what, _init=Exchange.__init__):
        received.extend(tensor.numel() for _, tensor in receives)
        _init(self, comm, sends, receives, what)

    x = dc.scatter(normal(1, 1, 40 * comm.size + 1, 3), grid_over(comm, h=comm.size))
    monkeypatch.setattr(Exchange, "__init__", noted)
    for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        pool(x, (10 * comm.size, 3))
    assert sum(received) <= 2 * 2 * 5 * 3


def test_ties_in_adaptive_windows_go_to_the_same_element_as_in_one_process(comm):
    for grid in grids(comm, "hw"):
        for size in (1, 3, (1, 4), (7, 2)):
            same_as_one_process(grid, lambda x, s=size: F.adaptive_max_pool2d(x, s), torch.zeros(1, 1, 7, 9).double())


@pytest.mark.parametrize(
    "pool",
    [
        partial(F.adaptive_max_pool2d, output_size=1),
        partial(F.adaptive_max_pool2d, output_size=(3, 1)),
        partial(F.adaptive_max_pool2d, output_size=(4, 9)),
        partial(torch._C._nn.adaptive_max_pool2d, output_size=(4, 5)),
    ],
)
@UP_TO_SIX_RANKS
def test_indices_count_in_the_global_space(comm, pool):
    options = {"return_indices": True} if pool.func is F.adaptive_max_pool2d else {}
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, **options)), normal(3, 2, 7, 9))
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, **options)), normal(1, 2, 8, 5).round())


@pytest.mark.parametrize(("count", "shape"), [(1, (3, 2, 9)), (3, (2, 2, 3, 7, 4))])
def test_indices_in_one_and_three_dimensions(comm, count, shape):
    pool = partial(getattr(F, f"adaptive_max_pool{count}d"), return_indices=True)
    for grid in grids(comm, {1: "nw", 3: "dw"}[count]):
        same_as_one_process(grid, lambda x: values_plus_indices(pool(x, 3)), normal(*shape))
