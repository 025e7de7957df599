"""Augmentation, mixing of samples, and metrics."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom(quick=True)
def images_and_labels_are_mixed(b: Bench) -> Found:
    """Mixup with one share for the batch."""
    x, labels = b.images(), b.labels()
    torch.manual_seed(1)
    order = torch.randperm(x.size(0))
    mixed = 0.3 * x + 0.7 * x[order]
    y = b.model(mixed)
    (0.3 * F.cross_entropy(y, labels) + 0.7 * F.cross_entropy(y, labels[order])).backward()
    return b.gradients() | {"mixed": mixed}


@idiom()
def boxes_are_cut_and_pasted(b: Bench) -> Found:
    """CutMix in place, with soft labels."""
    x, labels = b.images().clone(), F.one_hot(b.labels(), 5).double()
    x[:, :, 2:6, 3:8] = x.flip(0)[:, :, 2:6, 3:8]
    share = 1 - (4 * 5) / (x.size(-1) * x.size(-2))
    target = labels * share + labels.flip(0) * (1 - share)
    torch.sum(-target * F.log_softmax(b.model(x), dim=-1), dim=-1).mean().backward()
    return b.gradients() | {"x": x}


@idiom()
def timm_mixes_halves_of_a_batch_in_place(b: Bench) -> Found:
    x = b.images()
    flipped = x.flip(0).mul_(0.4)
    x.mul_(0.6).add_(flipped)
    off, on = 0.1 / 5, 1 - 0.1 + 0.1 / 5
    hot = torch.full((5, 5), off, dtype=x.dtype).scatter_(1, b.labels().long().view(-1, 1), on)
    target = hot * 0.6 + hot.flip(0) * 0.4
    F.cross_entropy(b.model(x), target).backward()
    return b.gradients()


@idiom()
def boxes_are_erased(b: Bench) -> Found:
    x = b.images()
    for i, (top, left) in enumerate([(0, 0), (3, 2), (5, 6), (1, 1), (2, 8)]):
        x[i, :, top : top + 2, left : left + 3] = normal(3, *x[i, 0, top : top + 2, left : left + 3].shape, seed=i)
    return {"x": x, "y": b.model.eval()(x)}


@idiom()
def images_are_flipped_one_by_one(b: Bench) -> Found:
    x, masks = b.images(), b.masks()
    flip = torch.tensor([True, False, True, True, False])
    turned = torch.where(flip[:, None, None, None], x.flip(3), x)
    turned_masks = torch.stack([m.flip(1) if f else m for m, f in zip(masks, flip, strict=True)])
    x[flip] = torch.flip(x[flip], dims=[2])
    return {"turned": turned, "masks": turned_masks, "x": x}


@idiom()
def images_are_rotated_and_scaled(b: Bench) -> Found:
    angle = torch.tensor([0.1, -0.4, 0.2, 0.9, 0.0], dtype=torch.float64)
    zero = torch.zeros_like(angle)
    theta = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos() * 1.2, zero + 0.1], 1).view(5, 2, 3)
    x = b.images()
    grid = F.affine_grid(theta, x.shape, align_corners=False)
    masks = F.grid_sample(b.masks()[:, None].double(), grid, mode="nearest", align_corners=False)
    return {"x": F.grid_sample(x, grid, padding_mode="reflection", align_corners=False), "masks": masks.long()}


@idiom()
def colours_are_jittered(b: Bench) -> Found:
    x = b.images().sigmoid()
    grey = (x * torch.tensor([0.299, 0.587, 0.114]).double().view(3, 1, 1)).sum(1, keepdim=True)
    contrast = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, 1.3)
    shade = torch.linspace(0.5, 1.5, 5).double().view(-1, 1, 1, 1)
    return {
        "x": ((grey * 0.3 + x * 0.7) * shade + contrast).clamp_(0, 1),
        "low": (x * 255).to(torch.uint8),
        "inverted": 1 - x,
    }


@idiom()
def images_are_standardized(b: Bench) -> Found:
    x = b.images().sub_(0.4).div_(torch.tensor([0.2, 0.3, 0.1]).double()[None, :, None, None])
    low, high = x.flatten(2).min(2)[0], x.flatten(2).max(2)[0]
    scaled = (x - low[:, :, None, None]) / (high - low).view(5, 3, 1, 1).clamp(min=1e-6)
    inside = x[x > 0]
    return {"scaled": scaled, "z": (x - inside.mean()) / inside.std(), "bytes": x.byte(), "deep": x.float().double()}


@idiom()
def images_change_their_size(b: Bench) -> Found:
    """Training at several scales."""
    x = b.images()
    found = {}
    for size in (6, 11, (5, 8)):
        for mode in ("bilinear", "nearest", "bicubic", "area"):
            found[f"{size} {mode}"] = b.model.eval()(F.interpolate(x, size=size, mode=mode))
    found["smooth"] = F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True, recompute_scale_factor=True)
    return found


@idiom()
def crops_are_taken_at_random(b: Bench) -> Found:
    torch.manual_seed(3)
    x = F.pad(b.images(), (2, 2, 2, 2), mode="reflect")
    crops = []
    for i in range(len(x)):
        top, left = torch.randint(0, 5, (1,)).item(), int(torch.randint(0, 5, ()))
        crops.append(x[i, :, top : top + 7, left : left + 9])
    return {"y": b.model.eval()(torch.stack(crops))}


@idiom()
def four_images_become_a_mosaic(b: Bench) -> Found:
    x = b.images()
    top, bottom = torch.cat([x[0], x[1]], dim=2), torch.cat([x[2], x[3]], dim=2)
    mosaic = torch.cat([top, bottom], dim=1).unsqueeze(0)
    return {"y": b.model.eval()(mosaic), "half": F.interpolate(mosaic, scale_factor=0.5, mode="bilinear")}


@idiom()
def predictions_of_flipped_images_are_averaged(b: Bench) -> Found:
    with torch.inference_mode():
        x = b.images()
        maps = b.model.eval().features(x) + b.model.features(x.flip(-1)).flip(-1)
        maps += torch.rot90(b.model.features(torch.rot90(x, 1, (2, 3)))[:, :, :8, :6], -1, (2, 3))[:, :, :6, :8].sum()
        return {"maps": maps / 2}


# -- metrics ----------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def right_answers_are_counted(b: Bench) -> Found:
    with torch.no_grad():
        y, labels = b.model.eval()(b.images()), b.labels()
        first = (y.argmax(1) == labels).float().mean()
        _, best = y.topk(3, 1, True, True)
        right = best.t().eq(labels.view(1, -1).expand_as(best.t()))
        counts = [right[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / 5) for k in (1, 3)]
        return {"first": first, "correct": y.max(1)[1].eq(labels).sum().item(), "top": torch.cat(counts)}


@idiom()
def a_confusion_matrix_is_counted(b: Bench) -> Found:
    net = b.made(lambda: nn.Conv2d(3, 5, 3, padding=1))
    guess, target = net(b.images()).argmax(1), b.masks()
    valid = target != 4
    matrix = torch.bincount(5 * target[valid] + guess[valid], minlength=25).reshape(5, 5)
    counted = torch.zeros(5, 5, dtype=torch.int64)
    for t, g in zip(target.view(-1).tolist(), guess.view(-1).tolist(), strict=True):
        counted[t, g] += 1
    overlap = matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag()).clamp(min=1)
    return {"matrix": matrix, "counted": counted, "iou": overlap, "mean": overlap.float().mean()}


@idiom()
def overlaps_of_classes_are_measured(b: Bench) -> Found:
    net = b.made(lambda: nn.Conv2d(3, 5, 3, padding=1))
    guess, target = net(b.images()).softmax(1).argmax(1), b.masks()
    found = {}
    for c in range(5):
        mine, theirs = guess == c, target == c
        both, either = (mine & theirs).sum().float(), (mine | theirs).sum().float()
        found[str(c)] = both / either if either > 0 else torch.tensor(math.nan)
        found[f"dice {c}"] = 2 * torch.logical_and(mine, theirs).sum() / (mine.sum() + theirs.sum() + 1e-8)
    return found


@idiom()
def noise_is_measured_in_decibels(b: Bench) -> Found:
    x, y = b.images(0).sigmoid(), b.images(1).sigmoid()
    mse = F.mse_loss(x, y, reduction="none").mean((1, 2, 3))
    return {
        "psnr": (10 * torch.log10(1.0 / mse)).mean(),
        "one": -10 * math.log10(mse[0].item()),
        "max": (x - y).abs().max(),
    }


@idiom()
def areas_under_curves_are_ranked(b: Bench) -> Found:
    scores, positive = b.images()[:, 0].flatten(), (b.masks() > 1).flatten()
    order = torch.argsort(scores, descending=True)
    hits = positive[order].double()
    tpr, fpr = torch.cumsum(hits, 0) / hits.sum(), torch.cumsum(1 - hits, 0) / (1 - hits).sum()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return {"auc": torch.trapz(tpr, fpr), "ap": (precision * hits).sum() / hits.sum()}


@idiom()
def embeddings_are_compared_with_a_bank(b: Bench) -> Found:
    """Nearest neighbours, as in self-supervised evaluation."""
    bank = F.normalize(normal(20, 5, seed=4), dim=1)
    with torch.no_grad():
        z = F.normalize(b.model.eval()(b.images()))
        scores, nearest = (z @ bank.t()).topk(4, dim=1, largest=True, sorted=True)
        classes = torch.arange(20) % 5
        votes = torch.gather(classes.view(1, -1).expand(5, -1), -1, nearest)
        weights = (scores / 0.1).exp()
        hot = torch.zeros(20, 5, dtype=torch.float64).scatter_(1, votes.view(-1, 1), 1.0)
        return {"votes": (hot.view(5, 4, 5) * weights.unsqueeze(-1)).sum(1).argmax(1), "nearest": nearest}


@idiom()
def statistics_of_features_are_collected(b: Bench) -> Found:
    """As for the Fréchet distance: means and covariances over batches, in plain lists."""
    collected = []
    with torch.no_grad():
        for seed in range(3):
            collected.append(b.model.eval().begin(b.images(seed)).mean((2, 3)).cpu())
    z = torch.cat(collected)
    return {"mean": z.mean(0), "covariance": torch.cov(z.t()), "correlation": torch.corrcoef(z.t())}


@idiom()
def losses_are_averaged_over_batches(b: Bench) -> Found:
    total, count, best = 0.0, 0, float("inf")
    with torch.no_grad():
        for seed in range(3):
            loss = b.loss(seed)
            total += loss.item() * len(b.labels())
            count += b.labels().size(0)
            best = min(best, float(loss))
    return {"mean": total / count, "best": best, "text": torch.tensor(float(f"{loss:.6f}"))}


@idiom()
def results_go_to_numpy(b: Bench) -> Found:
    y = b.model.eval()(b.images()).detach().cpu().numpy()
    return {"y": torch.tensor(y)}


@idiom()
def results_go_to_lists(b: Bench) -> Found:
    y = b.model.eval()(b.images())
    return {"y": torch.tensor(y.tolist()), "class": torch.tensor([int(c) for c in y.argmax(1)])}
