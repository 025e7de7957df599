"""Channels and filters split over axis c: convolutions and linear layers against one process, and partial sums."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.collectives import reduce_scatter_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.distribution import block_range
from distconv.parameters.channel_split import channel_split
from tests.distconv.layouts import grid_over, grids, normal
from tests.layers.compare import UP_TO_SIX_RANKS, built, check_module_same_as_one_process, close, same_as_one_process

SIZES = [(4, 4), (12, 12), (13, 5), (2, 12), (12, 2), (1, 3), (3, 1)]
"""C and F: gather-x where F is large, reduce-y where C is, the 2-D combination between, uneven and empty blocks."""


@pytest.mark.parametrize(("channels", "filters"), SIZES)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(2, 1, 1, 1), ((3, 5), (2, 3), (1, 0), (2, 1))],
)
@UP_TO_SIX_RANKS
def test_a_convolution_equals_one_process(comm, channels, filters, kernel, stride, padding, dilation):
    module = built(lambda: nn.Conv2d(channels, filters, kernel, stride, padding, dilation))
    for grid in grids(comm, "cnhw"):
        if grid.shape["c"] > 1 or comm.size == 1:
            check_module_same_as_one_process(grid, module, normal(2, channels, 7, 9))


@pytest.mark.parametrize("module", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize(("groups", "per_group"), [(12, 1), (24, 2), (2, 6)])
@pytest.mark.ranks(1, 2, 3, 4, 6)
def test_groups_equal_one_process(comm, module, groups, per_group):
    if comm.size % groups and groups % comm.size:
        pytest.skip("these groups do not divide over these ranks")
    layer = built(lambda: module(groups * 2, groups * per_group, 3, padding=1, groups=groups))
    for grid in [grid_over(comm, c=comm.size), *grids(comm, "ch")]:
        check_module_same_as_one_process(grid, layer, normal(2, groups * 2, 5, 4))


@pytest.mark.fault(13)
@pytest.mark.parametrize("module", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.ranks(2, 3, 4)
def test_groups_that_do_not_divide_are_computed_by_all_ranks_along_the_channels(comm, module, parallel):
    groups = comm.size + 1
    for grid in [grid_over(comm, c=comm.size), *grids(comm, "ch")]:
        layer = built(lambda: module(groups * 2, groups * 3, 3, padding=1, groups=groups))
        if not parallel:
            check_module_same_as_one_process(grid, layer, normal(2, groups * 2, 5, 4))
            continue
        model = dc.parallelize(copy.deepcopy(layer), grid)
        assert not isinstance(model.weight, dc.DistTensor) or grid.shape["c"] == 1
        of = {True: model, False: layer}
        same_as_one_process(grid, lambda x, of=of: of[isinstance(x, dc.DistTensor)](x), normal(2, groups * 2, 5, 4))
        close(model.weight.grad, layer.weight.grad, "weight")


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (13, 5), (2, 12), (12, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("between", [(), (3,)])
def test_a_linear_layer_equals_one_process(comm, inputs, outputs, between):
    module = built(lambda: nn.Linear(inputs, outputs))
    for grid in grids(comm, "cn"):
        dist = dc.Distribution(grid, ("n", *(None,) * len(between), "c"))
        check_module_same_as_one_process(dist, module, normal(4, *between, inputs))


def test_weights_that_are_not_where_they_are_needed_move_there(comm):
    for grid in grids(comm, "ch"):
        w, x = normal(6, 4, 3, 3, seed=1), normal(2, 4, 7, 5)
        same_as_one_process(grid, lambda x, w: F.conv2d(x, w, padding=1), x, w, dims=[None, ("c", None, None, None)])


def test_channels_split_over_another_axis_are_gathered(comm):
    dist = dc.Distribution(grid_over(comm, h=comm.size), ("n", "h", None, None))
    check_module_same_as_one_process(dist, built(lambda: nn.Conv2d(4, 6, 3)), normal(2, 4, 7, 5))


def test_the_sum_of_shares_is_the_adjoint_of_gathering(comm):
    grid = grid_over(comm, c=comm.size)
    dist, shape = dc.Distribution(grid, ("n", "c")), (3, 7)
    split = channel_split(7, 7, 1, comm.size)
    boxes = tuple(split.output_filters(i) for i in range(comm.size))
    plan = transfer_plan(dist, Needs(dist, ((1, boxes),)), shape)
    share = normal(3, boxes[comm.rank].extent, seed=comm.rank).requires_grad_()
    own = block_range(7, comm.size, comm.rank)
    y = normal(3, 7, seed=50)[:, own.start : own.stop]
    total = reduce_scatter_region(share, plan)
    total.backward(y)
    left, right = (comm.allreduce(float((a.detach() * b).sum())) for a, b in ((total, y), (share, share.grad)))
    assert left == pytest.approx(right, rel=1e-12)
