"""Losses, augmentations and metrics of classification, segmentation, detection and contrast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom
def anchors_are_matched_to_boxes(b: Bench) -> Found:
    """Anchors, objectness of those that match, and a loss at the matched ones only, as YOLO's and RetinaNet's."""
    head = b.made(lambda: nn.Conv2d(3, 2 * 6, 3, 2, 1))
    y = head(b.images())
    n, _, h, w = y.shape
    y = y.view(n, 2, 6, h, w).permute(0, 1, 3, 4, 2).contiguous()
    where = torch.tensor([[0, 1, 2, 3], [1, 0, 0, 0], [4, 1, 3, 4], [2, 0, 1, 1]])
    i, a, r, c = where.t()
    matched = y[i, a, r, c]
    objects = torch.zeros_like(y[..., 4])
    centre = matched[:, :2].sigmoid() * 2 - 0.5
    quality = (1 - (centre - 0.4).abs().sum(1)).detach().clamp(0)
    objects[i, a, r, c] = quality
    loss = (
        F.binary_cross_entropy_with_logits(y[..., 4], objects)
        + (centre - 0.4).abs().mean()
        + matched[:, 5].pow(2).mean()
    )
    loss.backward()
    return b.gradients(head) | {"objects": objects}


def segmented(b: Bench, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], classes: int = 5) -> Found:
    """A loss of logits and a class for each pixel, and the gradients of the network."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.Conv2d(7, classes, 1)))
    value = loss(net(b.images()), b.masks(classes))
    value.backward()
    return b.gradients(net) | {"loss": value}


@idiom
def sorted_errors_give_a_lovasz_loss(b: Bench) -> Found:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p, labels = x.softmax(1).permute(0, 2, 3, 1).reshape(-1, 5), target.view(-1)
        losses = []
        for c in range(5):
            fg = (labels == c).double()
            if fg.sum() == 0:
                continue
            errors, order = torch.sort((fg - p[:, c]).abs(), 0, descending=True)
            fg = fg[order]
            union = fg.sum() + (1 - fg).cumsum(0)
            jaccard = 1 - (fg.sum() - fg.cumsum(0)) / union
            jaccard[1:] = jaccard[1:] - jaccard[:-1]
            losses.append(torch.dot(errors, jaccard))
        return torch.stack(losses).mean()

    return segmented(b, loss)
