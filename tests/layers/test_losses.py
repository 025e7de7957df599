"""Losses: the mean over the global mini-batch on every rank, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.core.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process

AXES = {0: ["nc", "n"], 1: ["n-w", "nw"], 2: ["n-hw", "nhw"], 3: ["n-dhw", "ndhw"]}
SPACE = {0: (), 1: (9,), 2: (7, 4), 3: (3, 4, 5)}


def labels(*shape, classes=4, ignored=None):
    found = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    return (
        found
        if ignored is None
        else torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.4, ignored, found)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@UP_TO_SIX_RANKS
def test_cross_entropy_equals_one_process(comm, count, reduction, weighted):
    weight = normal(4, seed=2).abs() + 0.1 if weighted else None
    loss = partial(F.cross_entropy, weight=weight, reduction=reduction, ignore_index=1, label_smoothing=0.1 * count)
    shape = SPACE[count]
    for grid in grids(comm, ["n", "nw", "nhw", "dhw"][count]):
        y = same_as_one_process(grid, loss, normal(5, 4, *shape), labels(5, *shape, ignored=1), dims=AXES[count])
        assert reduction == "none" or not y.dist.split_axes


def test_a_mean_without_any_label_is_nan_as_in_one_process(comm):
    for grid in grids(comm, "nh"):
        target = torch.full((2, 7, 4), -100)
        same_as_one_process(grid, F.cross_entropy, normal(2, 4, 7, 4), target, dims=AXES[2])


def test_labels_that_only_some_ranks_have(comm):
    target = torch.full((2, 7, 4), -100)
    target[0, 0, 0] = 2
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, F.cross_entropy, normal(2, 4, 7, 4), target, dims=AXES[2])


def test_class_probabilities(comm):
    target = normal(5, 4, 7, 3, seed=1).softmax(1)
    for grid in grids(comm, "nhw"):
        for options in ({}, {"weight": normal(4, seed=2).abs()}, {"label_smoothing": 0.2}):
            same_as_one_process(grid, partial(lambda x, t, o: F.cross_entropy(x, t.detach(), **o), o=options),
                                normal(5, 4, 7, 3), target)  # fmt: skip


def test_a_plain_target_counts_as_whole(comm):
    target = labels(5, 7, 3)
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, lambda x: F.cross_entropy(x, target), normal(5, 4, 7, 3))


def test_a_target_in_another_layout_is_aligned(comm):
    x, target = normal(5, 4, 7, 3), labels(5, 7, 3)
    expected = F.cross_entropy(x, target)
    for grid in grids(comm, "nhw"):
        loss = F.cross_entropy(dc.scatter(x, grid), dc.scatter(target, grid_over(comm, n=comm.size), dims="nhw"))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_fewer_samples_than_ranks(comm):
    for count in (0, 2):
        for grid in grids(comm, "nh"):
            shape = SPACE[count]
            same_as_one_process(grid, F.cross_entropy, normal(1, 4, *shape), labels(1, *shape), dims=AXES[count])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "weights", [{}, {"pos_weight": (2, 1, 1)}, {"weight": (3, 2, 7, 5)}, {"weight": (2, 1, 1)}], ids=str
)
@UP_TO_SIX_RANKS
def test_bce_with_logits_equals_one_process(comm, reduction, weights):
    options = {name: normal(*shape, seed=2).abs() for name, shape in weights.items()}
    target = labels(3, 2, 7, 5, classes=2).double()
    for grid in grids(comm, "nhw"):
        same_as_one_process(
            grid,
            lambda x, t: F.binary_cross_entropy_with_logits(x, t.detach(), reduction=reduction, **options),
            normal(3, 2, 7, 5),
            target,
        )


def test_a_split_weight_of_bce_is_aligned(comm):
    target, weight = labels(3, 2, 7, 5, classes=2).double(), normal(3, 2, 7, 5, seed=1).abs()
    for grid in grids(comm, "nhw"):
        same_as_one_process(
            grid,
            lambda x, t, w: F.binary_cross_entropy_with_logits(x, t.detach(), w.detach()),
            normal(3, 2, 7, 5),
            target,
            weight,
        )


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@UP_TO_SIX_RANKS
def test_losses_of_two_tensors_equal_one_process(comm, loss, reduction):
    for grid in grids(comm, "nh"):
        same_as_one_process(
            grid, lambda a, b: loss(a, b, reduction=reduction), normal(3, 2, 7, 5), normal(3, 2, 7, 5, seed=1)
        )


def test_nll_and_plain_bce_equal_one_process(comm):
    ones = torch.ones(3, 2, 7, dtype=torch.float64)
    for grid in grids(comm, "nhw"):
        same_as_one_process(
            grid, lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), normal(5, 4, 7, 3), labels(5, 7, 3), dims=AXES[2]
        )
        same_as_one_process(grid, lambda x: F.binary_cross_entropy(x.sigmoid(), ones), normal(3, 2, 7))


def test_the_loss_is_the_same_number_on_every_rank(comm):
    for grid in grids(comm, "nhw"):
        loss = F.cross_entropy(dc.scatter(normal(5, 4, 7, 3), grid), dc.scatter(labels(5, 7, 3), grid, dims="nhw"))
        assert len(set(comm.allgather(loss.item()))) == 1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, t: F.cross_entropy(x, t[:, :3]), "size mismatch|Expected target size|must match|spatial"),
        (lambda x, t: F.cross_entropy(x, t, torch.ones(3).double()), "weight tensor should be defined"),
    ],
)
def test_what_torch_refuses_is_refused(comm, call, match):
    x, target = normal(5, 4, 7, 3), labels(5, 7, 3)
    with pytest.raises((RuntimeError, ValueError), match=match):
        call(x, target)
    grid = grid_over(comm, h=comm.size)
    split = dc.scatter(x, grid), dc.scatter(target, grid, dims="nhw")
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(*split))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_old_ways_to_reduce_are_refused(comm, loss):
    x = dc.scatter(normal(5, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "use reduction=", lambda: loss(x, x, reduce=False))
