"""Changes in place of results that are views in torch reach their source, or are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.spread import spread

SHAPE = (3, 4, 7, 5)


def test_a_view_changed_in_place_changes_its_source(comm):
    def change(x):
        y = x * 2
        y.view(3, -1).mul_(3)
        y.view(3, 4, 35)[:, 1].add_(1)
        y[:, :, 2].permute(1, 0, 2)[1].fill_(4.0)
        y.transpose(1, 2)[:, 0].neg_()
        return y * x

    for dist in spread(comm, SHAPE)[:2]:
        same_as_one_process(dist, change, normal(*SHAPE))


def test_a_slice_changed_in_place_changes_its_source(comm):
    def change(x):
        y = x * 2
        y.narrow(2, 1, 3).zero_()
        y.unsqueeze(0)[0, :, :, 1:].mul_(0.5)
        y[:, 1:3, ..., 2:].add_(1)
        return y * x

    for dist in spread(comm, SHAPE)[:2]:
        same_as_one_process(dist, change, normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
def test_a_copy_that_cannot_be_put_back_is_not_changed_in_place(comm):
    x = dc.scatter(normal(1, 2, 8, 4), grid_over(comm, h=comm.size))
    for call in (lambda: x.flatten(1).add_(1), lambda: x.unbind(2)[0].add_(1), lambda: x.unfold(2, 3, 1).zero_()):
        raises_everywhere(comm, dc.UnsupportedOperation, "it is a copy.*clone", call)


@pytest.mark.parametrize("change", [partial(F.relu, inplace=True), lambda x: x.mul_(2), torch.sigmoid_])
def test_a_change_of_a_view_reaches_its_source(comm, change):
    def run(x):
        y = x * 1
        change(y[:, :, 2:5])
        return y * 1

    for grid in grids(comm, "chw"):
        same_as_one_process(grid, run, normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("change", [partial(F.relu, inplace=True), torch.relu_, partial(F.dropout, inplace=True)])
def test_a_change_that_cannot_reach_its_source_is_refused(comm, change):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    torch.manual_seed(0)
    raises_everywhere(comm, dc.UnsupportedOperation, "clone", lambda: change(x.reshape(3, -1)))
