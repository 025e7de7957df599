"""Losses of segmentation: overlaps, hard pixels, borders, depths."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def segmented(b: Bench, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], classes: int = 5) -> Found:
    """A loss of logits and a class for each pixel, and the gradients of the network."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.Conv2d(7, classes, 1)))
    value = loss(net(b.images()), b.masks(classes))
    value.backward()
    return b.gradients(net) | {"loss": value}


@idiom()
def overlaps_of_segments_are_a_loss(b: Bench) -> Found:
    """The soft Dice loss."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        probabilities = x.softmax(1)
        hot = F.one_hot(target, x.shape[1]).permute(0, 3, 1, 2).to(x.dtype)
        both = torch.sum(probabilities * hot, dim=(2, 3))
        total = torch.sum(probabilities + hot, dim=(2, 3))
        return (1 - (2 * both + 1e-5) / (total + 1e-5)).mean() + F.cross_entropy(x, target)

    return segmented(b, loss)


@idiom()
def overlaps_of_a_batch_are_a_tversky_loss(b: Bench) -> Found:
    """SMP's: over the batch, flattened, classes that are absent left out."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        n, classes = x.size(0), x.size(1)
        p = x.log_softmax(dim=1).exp().view(n, classes, -1)
        hot = F.one_hot(target.view(n, -1), classes).permute(0, 2, 1)
        yes = (p * hot).sum((0, 2))
        fp, fn = (p * (1.0 - hot)).sum((0, 2)), ((1 - p) * hot).sum((0, 2))
        scores = 1 - yes / (yes + 0.3 * fp + 0.7 * fn).clamp_min(1e-7)
        return (scores * (hot.sum((0, 2)) > 0).to(scores.dtype)).mean() ** 0.75

    return segmented(b, loss)


@idiom(quick=True)
def only_the_hardest_pixels_count(b: Bench) -> Found:
    """OHEM by threshold, or at least so many."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(x, target, ignore_index=4, reduction="none").view(-1)
        hard = losses[losses > 1.6]
        if hard.numel() < 40:
            hard, _ = losses.topk(40)
        return hard.mean()

    return segmented(b, loss)


@idiom()
def the_hardest_share_of_each_image_counts(b: Bench) -> Found:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(x, target, reduction="none").flatten(1)
        return losses.topk(int(0.3 * losses.shape[1]), dim=1, sorted=False)[0].mean()

    return segmented(b, loss)


@idiom()
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


@idiom()
def distances_to_borders_weigh_pixels(b: Bench) -> Found:
    """A boundary loss: weights by erosion of the labels' masks."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(target, 5).permute(0, 3, 1, 2).double()
        eroded = -F.max_pool2d(-hot, 3, stride=1, padding=1)
        border = (hot - eroded).amax(1)
        return (F.cross_entropy(x, target, reduction="none") * (1 + 4 * border)).sum() / (1 + 4 * border).sum()

    return segmented(b, loss)


@idiom()
def centre_lines_are_compared(b: Bench) -> Found:
    """clDice: soft skeletons by repeated pooling."""

    def skeleton(x: torch.Tensor) -> torch.Tensor:
        def eroded(y: torch.Tensor) -> torch.Tensor:
            return torch.min(-F.max_pool2d(-y, (3, 1), 1, (1, 0)), -F.max_pool2d(-y, (1, 3), 1, (0, 1)))

        found = F.relu(x - F.max_pool2d(eroded(x), 3, 1, 1))
        for _ in range(2):
            x = eroded(x)
            delta = F.relu(x - F.max_pool2d(eroded(x), 3, 1, 1))
            found = found + F.relu(delta - found * delta)
        return found

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p, y = x.softmax(1)[:, 1:], F.one_hot(target, 5).permute(0, 3, 1, 2)[:, 1:].double()
        lines, true = skeleton(p), skeleton(y)
        precision, recall = (lines * y).sum() / (lines.sum() + 1), (true * p).sum() / (true.sum() + 1)
        return 1 - 2 * precision * recall / (precision + recall)

    return segmented(b, loss)


@idiom()
def two_classes_by_one_logit(b: Bench) -> Found:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits, y = x.squeeze(1), (target > 0).type_as(x)
        bce = F.binary_cross_entropy_with_logits(logits, y)
        p = torch.sigmoid(logits).reshape(-1)
        dice = 1 - (2 * (p * y.reshape(-1)).sum() + 1) / (p.sum() + y.sum() + 1)
        weight = torch.abs(F.avg_pool2d(y[:, None], 3, stride=1, padding=1) - y[:, None])
        iou = ((torch.sigmoid(x) * y[:, None]) * (1 + 5 * weight)).sum(dim=(2, 3))
        return bce + dice + 1 / (1 + iou).mean()

    return segmented(b, loss, classes=1)


@idiom()
def every_depth_has_its_own_loss(b: Bench) -> Found:
    """Deep supervision, as nnU-Net's."""
    maps = b.model.features(b.images())
    heads = b.made(lambda: nn.ModuleList([nn.Conv2d(6, 5, 1), nn.Conv2d(10, 5, 1), nn.Conv2d(7, 5, 1)]))
    begun = b.model.begin(b.images())
    outputs = [heads[0](maps), heads[1](F.relu(b.model.second(begun))), heads[2](begun)]
    target = b.masks()
    weights = [1.0, 0.5, 0.25]
    loss = 0.0
    for weight, y in zip(weights, outputs, strict=True):
        small = F.interpolate(target[:, None].double(), size=y.shape[2:], mode="nearest").squeeze(1).long()
        loss = loss + weight * F.cross_entropy(y, small)
    loss.backward()
    return b.gradients() | {f"heads {n}": g for n, g in b.gradients(heads).items()} | {"loss": loss}
