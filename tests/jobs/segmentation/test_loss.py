"""The loss of a segmentation network against torch and by hand, over grids too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.jobs.segmentation.loss import SegmentationLoss
from tests.distconv.layouts import grid_over

WEIGHTS = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


def test_of_one_class_it_is_cross_entropy_and_what_f1_lacks() -> None:
    # Four cells at a half each, one of them positive: log 2, and 1 - (2 * 0.5 + 1) / (4 * 0.5 + 1 + 1).
    label, loss = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]), SegmentationLoss(1, dice=True)
    assert loss(torch.zeros(1, 1, 2, 2), label).item() == pytest.approx(np.log(2) + 0.5)
    sure = 40 * (2 * label - 1)
    assert loss(sure[:, None], label).item() == pytest.approx(0.0, abs=1e-6)
    # The last place does not count: (2 * 0.5 + 1) / (3 * 0.5 + 1 + 1).
    ignored, zeros = torch.tensor([[[1.0, 0.0], [0.0, 9.0]]]), torch.zeros(1, 1, 2, 2)
    assert SegmentationLoss(1, 9, dice=True)(zeros, ignored).item() == pytest.approx(np.log(2) + 1 - 2 / 3.5)
    assert SegmentationLoss(1, 9)(zeros, torch.full_like(label, 9)).item() == 0


def expected(logits: torch.Tensor, labels: torch.Tensor, *, ignore: int | None, weights: Any, dice: bool) -> Any:
    """By torch's cross entropy and, class after class, soft Dice."""
    index = {} if ignore is None else {"ignore_index": ignore}
    loss = F.cross_entropy(logits, labels, weights, **index)
    if not dice:
        return loss
    valid = labels != ignore if ignore is not None else torch.ones_like(labels, dtype=torch.bool)
    lacking = 0
    for index_, probability in enumerate(torch.softmax(logits, 1).unbind(1)):
        p, t = probability[valid], (labels[valid] == index_).double()
        lacking += 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
    return loss + lacking / logits.shape[1]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dice", [False, True])
@pytest.mark.parametrize("ignore", [None, 255])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("axis", ["n", "h", "c"])
def test_over_grids_it_is_torchs_with_its_gradient(
    comm: Any, axis: str, weights: Any, ignore: int | None, dice: bool
) -> None:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 3, 7, 5, generator=random, dtype=torch.float64)
    labels = torch.randint(3, (3, 7, 5), generator=random)
    if ignore is not None:
        labels[torch.rand(labels.shape, generator=random) < 0.3] = ignore
    plain = logits.clone().requires_grad_()
    wanted = expected(plain, labels, ignore=ignore, weights=weights, dice=dice)
    wanted.backward()
    grid = grid_over(comm, **{axis: comm.size})
    x = dc.scatter(logits, grid).detach().requires_grad_()
    found = SegmentationLoss(3, ignore, weights, dice)(x, dc.scatter(labels, grid, dims="nhw"))
    found.backward()
    assert float(found) == pytest.approx(wanted.item(), rel=1e-12)
    assert (dc.gather(x.grad) - plain.grad).abs().max() < 1e-14


@pytest.mark.ranks(1, 2)
def test_a_batch_where_all_is_ignored_changes_nothing(comm: Any) -> None:
    grid = grid_over(comm, h=comm.size)
    x = dc.scatter(torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(1)), grid).detach().requires_grad_()
    loss = SegmentationLoss(3, 7, WEIGHTS.float())(x, dc.scatter(torch.full((1, 4, 4), 7), grid, dims="nhw"))
    loss.backward()
    assert float(loss) == 0 and not dc.gather(x.grad).any()
