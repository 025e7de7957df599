"""The sparse U-Net as a segmentation network over ranks: classes of sites against one process."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers import sparse
from distconv.layers.models.sparse import sparse_unet
from tests.distconv.layouts import grid_over
from tests.layers.sparse.clouds import random_cloud, rng_of
from tests.layers.sparse.test_distributed import check_same_as_one_process, grids


def test_over_ranks_classes_of_sites_are_as_in_one_process(comm):
    torch.manual_seed(0)
    model = sparse_unet(width=2, in_channels=2, classes=3, depth=2).double()
    x = random_cloud(rng_of("unet"), 3, 2, sites=80)
    for grid in grids(comm, 3):
        check_same_as_one_process(grid, model, x)
    # All sites are on the first rank.
    alone = sparse.Partition(grid_over(comm, d=comm.size), ((), (9,) * (comm.size - 1), (), ()))
    check_same_as_one_process(alone.grid, model, x, alone)


def test_a_loss_of_scattered_labels_is_that_of_one_process(comm):
    torch.manual_seed(0)
    model = sparse_unet(width=2, in_channels=2, classes=3, depth=1).double()
    x = random_cloud(rng_of("labels"), 3, 2, sites=60)
    labels = torch.arange(len(x.coords)) % 3
    expected_model = copy.deepcopy(model)
    expected = F.cross_entropy(expected_model(x).features, labels)
    expected.backward()
    grid = grid_over(comm, d=comm.size)
    split, split_labels = (sparse.scatter(each, grid) for each in (x, x.replace(labels[:, None])))
    loss = F.cross_entropy(dc.parallelize(model, grid)(split).features, split_labels.features[:, 0])
    loss.backward()
    torch.testing.assert_close(dc.gather(loss), expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
