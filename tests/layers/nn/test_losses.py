"""Losses: the mean over the global mini-batch on every rank, against one process."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import UP_TO_SIX_RANKS, same_as_one_process

AXES = {0: ["nc", "n"], 1: ["ncw", "nw"], 2: ["nchw", "nhw"], 3: ["ncdhw", "ndhw"]}
SPACE = {0: (), 1: (9,), 2: (7, 4), 3: (3, 4, 5)}


def labels(*shape, classes=4, ignored=None):
    found = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    return (
        found
        if ignored is None
        else torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.4, ignored, found)
    )


def test_a_mean_without_any_label_is_nan_as_in_one_process(comm):
    for grid in grids(comm, "nh"):
        target = torch.full((2, 7, 4), -100)
        same_as_one_process(grid, F.cross_entropy, normal(2, 4, 7, 4), target, dims=AXES[2])


def test_labels_that_only_some_ranks_have(comm):
    target = torch.full((2, 7, 4), -100)
    target[0, 0, 0] = 2
    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, F.cross_entropy, normal(2, 4, 7, 4), target, dims=AXES[2])


def test_fewer_samples_than_ranks(comm):
    for count in (0, 2):
        for grid in grids(comm, "nh"):
            shape = SPACE[count]
            same_as_one_process(grid, F.cross_entropy, normal(1, 4, *shape), labels(1, *shape), dims=AXES[count])


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


@pytest.mark.parametrize("classes", [7, 8, 9])
def test_channels_last_logits(comm, classes):
    """From 8 classes on, the loss is computed with a row for each position."""
    logits = normal(2, classes, 7, 5).contiguous(memory_format=torch.channels_last)
    target, weight = labels(2, 7, 5, classes=classes, ignored=-100), normal(classes, seed=5).abs()
    for grid in grids(comm, "nhwc"):
        for reduction in ("mean", "sum", "none"):
            same_as_one_process(
                grid,
                lambda x, t, w, reduction=reduction: F.cross_entropy(x, t, w.detach(), reduction=reduction),
                logits,
                target,
                weight,
                dims=["nchw", "nhw", None],
            )


@pytest.mark.ranks(2)
def test_channels_last_logits_are_not_copied(comm):
    grid = dc.ProcessGrid(comm, h=2)
    logits = normal(1, 8, 32, 32).contiguous(memory_format=torch.channels_last)
    x, t = dc.scatter(logits, grid).requires_grad_(), dc.scatter(labels(1, 32, 32, classes=8), grid, dims="nhw")
    F.cross_entropy(x, t)  # the first call computes with meta tensors, too
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.autograd.grad(F.cross_entropy(x, t), x)
    copied = [event.input_shapes[0] for event in profile.events() if event.name in ("aten::copy_", "aten::clone")]
    assert not [shape for shape in copied if math.prod(shape) >= x.local.numel()]


LOSSES = {
    "margin ranking": lambda a, b, **o: F.margin_ranking_loss(a, b, torch.ones(1, 1, 1, 5).double(), margin=0.3, **o),
    "gaussian of a variance for all samples": lambda a, b, **o: F.gaussian_nll_loss(a, b, b[:1].exp(), **o),
    "gaussian without the last dimension": lambda a, b, **o: F.gaussian_nll_loss(a, b, b.mean(-1).abs(), **o),
    "multilabel": lambda a, b, **o: F.multilabel_soft_margin_loss(a, (b > 0).double(), torch.arange(5), **o),
    "divergence": lambda a, b, **o: F.kl_div(a.log_softmax(1), b.softmax(1), **o),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
@UP_TO_SIX_RANKS
def test_losses_of_two_tensors_equal_one_process(comm, name):
    a, b = normal(3, 2, 7, 5), normal(3, 2, 7, 5, seed=1)
    reductions = ["mean", "sum", "none"] + ["batchmean"] * name.startswith("divergence")
    for grid in grids(comm, "nch"):
        for reduction in reductions:
            positive = (a.abs(), b.abs()) if name.startswith("poisson") else (a, b)
            y = same_as_one_process(grid, partial(LOSSES[name], reduction=reduction), *positive)
            assert reduction == "none" or not y.dist.split_axes


@pytest.mark.ranks(at_least=2)
def test_half_precision_counts_all_labels(comm):
    target = labels(3, 300, 300)
    logits = normal(3, 4, 300, 300).half()
    loss = F.cross_entropy(dc.scatter(logits, grid_over(comm, h=comm.size)), target)
    expected = F.cross_entropy(logits.double(), target)
    assert loss.dtype == torch.float16 and loss.item() == pytest.approx(expected.item(), rel=2e-3)


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
def test_arguments_that_torch_rejects_raise(comm, call, match):
    x, target = normal(5, 4, 7, 3), labels(5, 7, 3)
    with pytest.raises((RuntimeError, ValueError), match=match):
        call(x, target)
    grid = grid_over(comm, h=comm.size)
    split = dc.scatter(x, grid), dc.scatter(target, grid, dims="nhw")
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(*split))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, F.kl_div])
@pytest.mark.ranks(at_least=2)
def test_deprecated_options_of_the_reduction_raise(comm, loss):
    x = dc.scatter(normal(5, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "use reduction=", lambda: loss(x, x, reduce=False))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        # torch's own body says the first three.
        (lambda x: F.gaussian_nll_loss(x, x, x), ValueError, "var has negative entry"),
        (lambda x: F.gaussian_nll_loss(x, x, x.abs(), reduction="all"), ValueError, "all is not valid"),
        (lambda x: F.gaussian_nll_loss(x, x, x.sum(0).abs()), ValueError, "var is of incorrect size"),
        (lambda x: F.mse_loss(x, x, reduction="all"), dc.ShapeError, "all is not a valid value for reduction"),
    ],
)
def test_wrong_arguments_raise_torchs_error(comm, call, error, match):
    with pytest.raises(ValueError, match=match):
        call(normal(5, 4))
    x = dc.scatter(normal(5, 4), grid_over(comm, n=comm.size))
    raises_everywhere(comm, error, match, lambda: call(x))


@pytest.mark.cpu
def test_a_label_that_is_invalid_on_one_rank_raises_on_all_ranks(comm):
    target = labels(5, 7, 3)
    target[4, 6, 2] = 9
    grid = grid_over(comm, h=comm.size)
    split = dc.scatter(normal(5, 4, 7, 3), grid), dc.scatter(target, grid, dims="nhw")
    raises_everywhere(comm, dc.LabelError, "Target 9 is out of bounds", lambda: F.cross_entropy(*split))


def test_torchs_numbers_for_reductions_and_their_default(comm):
    a, b = normal(6, 4), normal(6, 4, seed=1).sigmoid()
    for grid in grids(comm, "nc"):
        for loss in (torch.binary_cross_entropy_with_logits, torch.kl_div):
            for options in ({}, {"reduction": 0}, {"reduction": 1}, {"reduction": 2}):
                same_as_one_process(grid, partial(loss, **options), a, plain=(b,))


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("samples", [7, 1])
@pytest.mark.ranks(1, 2, 3)
def test_ctc_loss_equals_one_process(comm, reduction, samples):
    words = torch.randint(1, 5, (samples, 4), generator=torch.Generator().manual_seed(2))
    steps, lengths = torch.tensor([9, 6, 9, 3, 9, 8, 2])[:samples], torch.tensor([4, 2, 0, 3, 4, 1, 4])[:samples]

    def loss(x, words, steps=steps, lengths=lengths):
        return F.ctc_loss(x.log_softmax(2), words, steps, lengths, reduction=reduction, zero_infinity=True)

    for axis in "nwc":
        grid = grid_over(comm, **{axis: comm.size})
        same_as_one_process(grid, loss, normal(9, samples, 5), words, dims=["wnc", "n-"])
    grid = grid_over(comm, n=comm.size)
    numbers = tuple(steps.tolist()), tuple(lengths.tolist())
    same_as_one_process(grid, lambda x: loss(x, words, *numbers), normal(9, samples, 5), dims=["wnc"])
