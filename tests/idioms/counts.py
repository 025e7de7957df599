"""Masks, counts, sums of what belongs together, distances."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom(quick=True)
def features_under_a_mask_are_averaged(b: Bench) -> Found:
    x = b.model.begin(b.images())
    y = x[x > 0.3]
    z = x.permute(0, 2, 3, 1)[x.sum(1) > 1.0]
    ((y**2).mean() + z.std(0).sum()).backward()
    return b.gradients() | {"y": y, "z": z}


@idiom()
def pixels_without_a_label_are_left_out(b: Bench) -> Found:
    x, labels = b.images(0, 5).requires_grad_(), b.masks()
    keep = labels != 2
    loss = F.cross_entropy(x.permute(0, 2, 3, 1)[keep], labels[keep])
    loss.backward()
    return {"loss": loss, "dL/dx": x.grad}


@idiom()
def hard_pixels_are_mined(b: Bench) -> Found:
    x = b.images(0, 5).requires_grad_()
    losses = F.cross_entropy(x, b.masks(), reduction="none").view(-1)
    hard = losses[losses > 1.7]
    if hard.numel() < 20:
        hard = losses.topk(20)[0]
    hard.mean().backward()
    return {"hard": hard, "dL/dx": x.grad}


@idiom()
def samples_and_channels_are_picked_by_masks(b: Bench) -> Found:
    x = b.images().requires_grad_()
    y = b.model.begin(x[b.labels() > 1])
    z = x[:, torch.tensor([True, False, True])]
    (y.sum() + (z**2).sum() + x[x > 100].sum()).backward()
    return {"y": y, "z": z, "dL/dx": x.grad}


@idiom()
def weights_are_pruned_by_size(b: Bench) -> Found:
    weight = b.model.second.weight
    large = weight.abs() > weight.detach().abs().flatten().kthvalue(100)[0]
    weight[large].abs().mean().backward()
    return b.gradients() | {"number": weight[large].numel(), "left": weight[large]}


@idiom(quick=True)
def labels_are_counted(b: Bench) -> Found:
    labels, found = b.masks(), b.images(0, 5).argmax(1)
    confusion = torch.bincount((5 * labels + found).view(-1), minlength=25).view(5, 5)
    again = torch.zeros(5, 5, dtype=torch.float64)
    again.index_put_((labels.view(-1), found.view(-1)), torch.ones((), dtype=torch.float64), accumulate=True)
    kinds, counts = torch.unique(labels, return_counts=True)
    return {
        "confusion": confusion,
        "again": again,
        "kinds": kinds,
        "counts": counts,
        "known": torch.isin(labels, kinds),
    }


@idiom()
def values_are_sorted_into_bins(b: Bench) -> Found:
    edges = torch.linspace(-2, 2, 9, dtype=torch.float64)
    return {"bins": torch.bucketize(b.images(), edges), "counts": torch.histc(b.images(), 7)}


@idiom(quick=True)
def prototypes_are_means_of_their_classes(b: Bench) -> Found:
    x = b.model.begin(b.images())
    features, labels = x.permute(0, 2, 3, 1).reshape(-1, 7), b.masks().reshape(-1)
    sums = torch.zeros(5, 7, dtype=torch.float64).index_add(0, labels, features)
    means = sums / torch.bincount(labels, minlength=5).clamp(min=1)[:, None]
    torch.cdist(features, means).mean().backward()
    return b.gradients() | {"means": means}


@idiom()
def clusters_move_with_what_is_nearest(b: Bench) -> Found:
    centres = nn.Parameter(normal(6, 3, seed=1))
    x = b.images().permute(0, 2, 3, 1).reshape(-1, 3)
    distance, nearest = torch.cdist(x, centres).min(1)
    distance.sum().backward()
    moved = torch.zeros(6, 3, dtype=torch.float64).index_add_(0, nearest, x)
    return {"dL/dcentres": centres.grad, "moved": moved, "nearest": nearest}


@idiom()
def rows_are_reduced_by_place(b: Bench) -> Found:
    x = b.images().requires_grad_()
    place = (b.images(1) * 5).long().abs() % 9
    y = x.scatter_reduce(3, place, x * 2, "amax")
    z = x.scatter_reduce(2, place % 7, x * 2, "sum", include_self=False)
    (y.sum() + (z**2).sum()).backward()
    return {"y": y, "z": z, "dL/dx": x.grad}
