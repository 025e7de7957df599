"""Pooling over a kernel map, and over all sites of a sample. Inactive sites take no part."""

from __future__ import annotations

from typing import Any

import torch

from distconv.autograd.derivatives import first_order_only

from .kernel_map import KernelMap


def sparse_max_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """The largest feature of each window (N_out, C); 0 where a window holds no site.

    The gradient goes to the first of equal ones, in the order of the offsets; NaNs win, both as in torch.
    """
    out: torch.Tensor = _Max.apply(features, pairs)  # type: ignore[no-untyped-call]
    return out


def sparse_sum_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """The sum of the features of each window (N_out, C)."""
    out: torch.Tensor = _Sum.apply(features, pairs)  # type: ignore[no-untyped-call]
    return out


def sparse_average_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """The mean over the sites of each window (N_out, C); 0 where there is none."""
    counts = torch.zeros(pairs.out_sites, dtype=torch.long, device=features.device)
    for group in pairs.groups:
        counts += group.ends.diff()
    return sparse_sum_pool(features, pairs) / counts.clamp_(min=1)[:, None].to(features.dtype)


def global_sum(features: torch.Tensor, samples: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The sum over the sites of each sample, (B, C); ``samples`` (N,) are the batch indices of the sites."""
    return features.new_zeros(batch_size, features.shape[1]).index_add(0, samples, features)


def global_max(features: torch.Tensor, samples: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The largest feature of each sample, (B, C); 0 for a sample without sites. The first of equal ones counts."""
    sites, channels = features.shape
    index = samples[:, None].expand(-1, channels)
    x = features.detach()
    largest = x.new_zeros(batch_size, channels).scatter_reduce(0, index, x, "amax", include_self=False)
    rows = torch.arange(sites, device=x.device)[:, None].expand(-1, channels)
    candidates = torch.where((x == largest[samples]) | x.isnan(), rows, sites)
    first = torch.full_like(largest, sites, dtype=torch.long).scatter_reduce(0, index, candidates, "amin")
    # Row N is of zeros, for samples without sites.
    return torch.cat([features, features.new_zeros(1, channels)]).gather(0, first)


class _Sum(torch.autograd.Function):
    """Features (N_in, C) -> (N_out, C)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        ctx.pairs = pairs
        return _added(features, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sparse_sum_pool(gradient, ctx.pairs.transposed()), None


def _added(x: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    out = x.new_zeros(pairs.out_sites, x.shape[1])
    for group in pairs.groups:
        out += group.summed(x, torch.cat([pairs.pairs[k][0] for k in group.offsets]))
    return out


class _Max(torch.autograd.Function):
    """Features (N_in, C) -> (N_out, C)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        largest = features.new_zeros(pairs.out_sites, features.shape[1])
        offset_of = torch.full_like(largest, -1, dtype=torch.int32)
        for k, (inputs, outputs) in enumerate(pairs.pairs):
            x, best, at = features.index_select(0, inputs), largest[outputs], offset_of[outputs]
            better = (x > best) | (at < 0) | (x.isnan() & ~best.isnan())
            largest[outputs] = torch.where(better, x, best)
            offset_of[outputs] = torch.where(better, k, at)
        ctx.pairs = pairs
        ctx.save_for_backward(offset_of)
        return largest

    @staticmethod
    @first_order_only("sparse max pooling")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (offset_of,) = ctx.saved_tensors
        dx = gradient.new_zeros(ctx.pairs.in_sites, gradient.shape[1])
        for k, (inputs, outputs) in enumerate(ctx.pairs.pairs):
            dx.index_add_(0, inputs, gradient[outputs] * (offset_of[outputs] == k))
        return dx, None
