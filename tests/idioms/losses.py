"""Losses of classification, detection, restoration and contrast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def classified(b: Bench, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Found:
    """A loss of logits and labels, and the gradients of the network."""
    value = loss(b.model(b.images()), b.labels())
    value.backward()
    return b.gradients() | {"loss": value}


def restored(b: Bench, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Found:
    """A loss of an image and the one it should be."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.GELU(), nn.Conv2d(7, 3, 3, padding=1)))
    value = loss(net(b.images(0)).sigmoid(), b.images(1).sigmoid())
    value.backward()
    return b.gradients(net) | {"loss": value}


# -- classification ---------------------------------------------------------------------------------------------------


@idiom(quick=True)
def labels_are_smoothed(b: Bench) -> Found:
    return classified(b, nn.CrossEntropyLoss(label_smoothing=0.1))


@idiom()
def labels_are_smoothed_by_hand(b: Bench) -> Found:
    """timm's."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logs = F.log_softmax(x, dim=-1)
        nll = -logs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
        return (0.9 * nll + 0.1 * -logs.mean(dim=-1)).mean()

    return classified(b, loss)


@idiom()
def classes_have_weights_and_some_are_ignored(b: Bench) -> Found:
    weights = torch.tensor([1.0, 2, 0.5, 3, 1], dtype=torch.float64)
    return classified(b, nn.CrossEntropyLoss(weight=weights, ignore_index=3))


@idiom()
def hard_samples_weigh_more(b: Bench) -> Found:
    """The focal loss."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(x, target, reduction="none")
        return (0.25 * (1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    return classified(b, loss)


@idiom()
def each_class_is_its_own_yes_or_no(b: Bench) -> Found:
    """Asymmetric loss for several labels."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(target, 5).double()
        yes, no = x.sigmoid(), (1 - x.sigmoid() + 0.05).clamp(max=1)
        logs = hot * yes.clamp(min=1e-8).log() + (1 - hot) * no.clamp(min=1e-8).log()
        with torch.no_grad():
            weight = (1 - yes * hot - no * (1 - hot)) ** (hot + 4 * (1 - hot))
        return -(logs * weight).sum()

    return classified(b, loss)


@idiom()
def angles_have_a_margin(b: Bench) -> Found:
    """ArcFace."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(normal(5, 5)))
        phi = torch.cos(torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7)) + 0.5)
        hot = torch.zeros_like(cosine)
        hot.scatter_(1, target.view(-1, 1).long(), 1)
        return F.cross_entropy(16 * (hot * phi + (1.0 - hot) * cosine), target)

    return classified(b, loss)


@idiom()
def other_losses_of_torch_for_classes(b: Bench) -> Found:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(target, 5).double()
        return (
            F.multi_margin_loss(x, target) + F.binary_cross_entropy_with_logits(x, hot,
                pos_weight=torch.ones(5).double() * 2)
            + F.multilabel_soft_margin_loss(x, hot) + F.kl_div(x.log_softmax(1), hot * 0.9 + 0.02,
                reduction="batchmean")
            + F.nll_loss(F.log_softmax(x, 1), target) + F.poisson_nll_loss(x, hot) + F.hinge_embedding_loss(x,
                hot * 2 - 1)
        )  # fmt: skip

    return classified(b, loss)


# -- restoration ------------------------------------------------------------------------------------------------------


@idiom()
def structural_similarity_is_a_loss(b: Bench) -> Found:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        line = torch.exp(-((torch.arange(5).double() - 2) ** 2) / 4.5)
        window = (line[:, None] @ line[None] / line.sum() ** 2).expand(3, 1, 5, 5).contiguous()

        def blur(z: torch.Tensor) -> torch.Tensor:
            return F.conv2d(z, window, padding=2, groups=3)

        mx, my = blur(x), blur(y)
        vx, vy, vxy = blur(x * x) - mx.pow(2), blur(y * y) - my.pow(2), blur(x * y) - mx * my
        ssim = ((2 * mx * my + 1e-4) * (2 * vxy + 9e-4)) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
        return 1 - ssim.mean()

    return restored(b, loss)


@idiom()
def differences_of_neighbours_are_penalized(b: Bench) -> Found:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = (x[:, :, 1:] - x[:, :, :-1]).abs(), (x[:, :, :, 1:] - x[:, :, :, :-1]).pow(2)
        charbonnier = torch.sqrt((x - y) ** 2 + 1e-6).mean()
        return charbonnier + 0.1 * rows.mean() + 0.1 * columns.sum() / x.numel()

    return restored(b, loss)


@idiom()
def features_of_a_frozen_network_are_compared(b: Bench) -> Found:
    """The perceptual loss, with Gram matrices for style."""
    frozen = b.made(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1)), seed=9)
    frozen.eval().requires_grad_(False)

    def gram(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.size()
        return torch.mm(x.view(n * c, h * w), x.view(n * c, h * w).t()).div(n * c * h * w)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = torch.tensor([0.485, 0.456, 0.406]).double().view(-1, 1, 1)
        theirs = frozen((y - mean) / 0.225).detach()
        mine = frozen((x - mean) / 0.225)
        return F.l1_loss(mine, theirs) + F.mse_loss(gram(mine), gram(theirs))

    return restored(b, loss)


@idiom()
def spectra_are_compared(b: Bench) -> Found:
    """The focal frequency loss."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mine, theirs = torch.fft.fft2(x, norm="ortho"), torch.fft.fft2(y, norm="ortho")
        apart = torch.stack([mine.real - theirs.real, mine.imag - theirs.imag], -1).pow(2).sum(-1)
        weight = apart.detach().sqrt()
        weight = weight / weight.max(-1)[0].max(-1)[0][:, :, None, None]
        return (weight * apart).mean()

    return restored(b, loss)


@idiom()
def torch_losses_of_regression(b: Bench) -> Found:
    return restored(
        b,
        lambda x, y: F.mse_loss(x, y) + F.smooth_l1_loss(x, y, beta=0.1) + F.huber_loss(x, y, delta=0.2)
        + F.l1_loss(x, y, reduction="none").amax((1, 2, 3)).mean() + F.binary_cross_entropy(x, y)
        + F.gaussian_nll_loss(x, y, (x * 0 + 0.5)) + F.soft_margin_loss(x, y.round() * 2 - 1),
    )  # fmt: skip


@idiom()
def depths_are_compared_up_to_a_scale(b: Bench) -> Found:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        valid = y > 0.3
        apart = torch.log(x[valid]) - torch.log(y[valid])
        return torch.sqrt((apart**2).mean() - 0.85 * apart.mean() ** 2)

    return restored(b, loss)


@idiom()
def shifted_images_are_correlated_locally(b: Bench) -> Found:
    """Local normalized cross-correlation (registration)."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        filters = torch.ones(1, 3, 5, 5, dtype=x.dtype)
        sums = [F.conv2d(z, filters, padding=2) for z in (x, y, x * x, y * y, x * y)]
        size = 75.0
        cross = sums[4] - sums[0] * sums[1] / size
        return -(cross**2 / ((sums[2] - sums[0] ** 2 / size) * (sums[3] - sums[1] ** 2 / size) + 1e-3)).mean()

    return restored(b, loss)


# -- detection --------------------------------------------------------------------------------------------------------


@idiom()
def boxes_are_compared_by_overlap(b: Bench) -> Found:
    """GIoU of boxes that a head predicts at each place."""
    head = b.made(lambda: nn.Conv2d(3, 4, 3, padding=1))
    y = head(b.images()).exp()
    rows, columns = torch.meshgrid(torch.arange(7), torch.arange(9), indexing="ij")
    left, top, right, bottom = y.unbind(1)
    boxes = torch.stack((columns - left, rows - top, columns + right, rows + bottom), -1).view(-1, 4)
    target = torch.tensor([2.0, 1.0, 6.0, 5.0]).double().expand_as(boxes)
    low, high = torch.max(boxes[:, :2], target[:, :2]), torch.min(boxes[:, 2:], target[:, 2:])
    overlap = (high - low).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) + 16.0
    union = areas - overlap
    hull = (torch.max(boxes[:, 2:], target[:, 2:]) - torch.min(boxes[:, :2], target[:, :2])).prod(1)
    giou = overlap / union - (hull - union) / hull
    inside = (y.amin(1) > 0.5).view(-1)
    loss = (1 - giou[inside]).sum() / max(inside.sum().item(), 1)
    loss.backward()
    return b.gradients(head) | {"loss": loss}


@idiom()
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


@idiom()
def predictions_are_concatenated_over_levels(b: Bench) -> Found:
    """Distribution focal loss over bins of distances, levels joined."""
    maps = [b.model.begin(b.images()), F.avg_pool2d(b.model.begin(b.images()), 2)]
    head = b.made(lambda: nn.Conv2d(7, 8, 1))
    joined = torch.cat([head(m).view(5, 8, -1) for m in maps], 2).permute(0, 2, 1)
    bins = joined.view(5, -1, 2, 4).softmax(3)
    distances = bins.matmul(torch.arange(4, dtype=torch.float64))
    target = torch.full_like(distances, 1.3)
    left = target.long()
    logits = joined.reshape(-1, 4)
    loss = F.cross_entropy(logits, left.view(-1), reduction="none") * 0.7 + 0.3 * F.cross_entropy(
        logits, left.view(-1) + 1, reduction="none"
    )
    (loss.mean() + F.l1_loss(distances, target)).backward()
    return b.gradients() | b.gradients(head) | {"distances": distances}


@idiom()
def the_best_boxes_suppress_their_neighbours(b: Bench) -> Found:
    boxes = b.images().flatten(2).transpose(1, 2)[0][:12]
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 1:].abs() + 0.5], 1)
    scores = b.images(1).flatten()[:12]
    kept, order = [], scores.argsort(descending=True)
    while order.numel() > 0:
        first = order[0]
        kept.append(first.item())
        low = torch.maximum(boxes[first, :2], boxes[order[1:], :2])
        high = torch.minimum(boxes[first, 2:], boxes[order[1:], 2:])
        overlap = (high - low).clamp(min=0).prod(1)
        order = order[1:][overlap < 0.3]
    return {"kept": torch.tensor(kept)}


# -- contrast ---------------------------------------------------------------------------------------------------------


def embedded(b: Bench, loss: Callable[..., torch.Tensor]) -> Found:
    """A loss of the embeddings of two views of the images."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(140, 5)))
    value = loss(net(b.images(0)), net(b.images(0).flip(-1)))
    value.backward()
    return b.gradients(net) | {"loss": value}


@idiom(quick=True)
def two_views_find_each_other(b: Bench) -> Found:
    """NT-Xent (SimCLR)."""

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        z = F.normalize(torch.cat([first, second], dim=0), dim=1)
        scores = torch.mm(z, z.t()) / 0.5
        scores = scores.masked_fill(torch.eye(10, dtype=torch.bool), -9e15)
        positive = torch.arange(10).roll(5)
        return F.cross_entropy(scores, positive)

    return embedded(b, loss)


@idiom()
def views_agree_and_features_differ(b: Bench) -> Found:
    """Barlow Twins and VICReg."""

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        a, c = (first - first.mean(0)) / first.std(0), (second - second.mean(0)) / second.std(0)
        correlation = a.T @ c / len(a)
        diagonal = torch.diagonal(correlation).add_(-1).pow_(2).sum()
        off = correlation.flatten()[:-1].view(4, 6)[:, 1:].flatten().pow(2).sum()
        spread = F.relu(1 - torch.sqrt(first.var(dim=0) + 1e-4)).mean()
        return diagonal + 0.005 * off + spread + F.mse_loss(first, second)

    return embedded(b, loss)


@idiom()
def samples_of_a_class_attract_each_other(b: Bench) -> Found:
    """Supervised contrast, and triplets of the hardest."""

    def loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        z, labels = F.normalize(torch.cat([first, second]), dim=1), b.labels().repeat(2).contiguous().view(-1, 1)
        same = torch.eq(labels, labels.T).double()
        scores = z @ z.T / 0.3
        scores = scores - scores.max(dim=1, keepdim=True).values.detach()
        others = torch.scatter(torch.ones_like(same), 1, torch.arange(10).view(-1, 1), 0)
        logs = scores - torch.log((torch.exp(scores) * others).sum(1, keepdim=True))
        mean = ((same * others) * logs).sum(1) / (same * others).sum(1)
        apart = torch.cdist(z, z)
        farthest = (apart * same).max(1)[0]
        nearest = (apart + 10 * same).min(1)[0]
        return (
            -mean.mean()
            + F.relu(farthest - nearest + 0.3).mean()
            + F.triplet_margin_loss(z, z.roll(5, 0), z.roll(1, 0))
        )

    return embedded(b, loss)
