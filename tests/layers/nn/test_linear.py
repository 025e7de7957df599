"""Linear layers against one process."""

from __future__ import annotations

import pytest
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import built, check_module_same_as_one_process

SHAPE = (3, 2, 7, 4)


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (9, 5)])
def test_a_linear_layer_equals_one_process(comm, shape):
    for grid in grids(comm, "nh"):
        for bias in (True, False):
            check_module_same_as_one_process(grid, built(lambda bias=bias: nn.Linear(5, 4, bias)), normal(*shape))


def test_a_linear_layer_on_the_last_of_several_dimensions(comm):
    for grid in grids(comm, "nhw"):
        module = built(lambda: nn.Linear(4, 3))
        check_module_same_as_one_process(grid, module, normal(*SHAPE))


def test_a_linear_layer_over_features_of_the_wrong_number_raises_torchs_error(comm):
    x = dc.scatter(normal(3, 6), grid_over(comm, n=comm.size))
    module = built(lambda: nn.Linear(5, 4))
    raises_everywhere(
        comm, dc.ShapeError, r"mat1 and mat2 shapes cannot be multiplied \(3x6 and 5x4\)", lambda: module(x)
    )


def test_pooled_features_into_a_linear_head(comm):
    head = built(lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)))
    for grid in grids(comm, "nhw"):
        check_module_same_as_one_process(grid, head, normal(*SHAPE))
