"""Pooling over the windows of a kernel map, and over all sites of a sample. Only active sites contribute.

The layers of :mod:`distconv.layers.sparse` call it on local features. The module contains no communication.
"""

from __future__ import annotations

from typing import Any

import torch

from distconv.autograd.derivatives import first_order_only

from .kernel_map import KernelMap


def sparse_max_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """Return the largest feature of each window; 0 for a window without sites.

    The gradient goes to the first of equal features, in the order of the offsets. NaN counts as the largest. Both are
    as in torch.

    Parameters
    ----------
    features : Tensor
        Shape (N_in, C).
    pairs : KernelMap
        The windows.

    Returns
    -------
    Tensor
        Shape (N_out, C).
    """
    out: torch.Tensor = _Max.apply(features, pairs)  # type: ignore[no-untyped-call]
    return out


def sparse_sum_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """Return the sum of the features of each window.

    Parameters
    ----------
    features : Tensor
        Shape (N_in, C).
    pairs : KernelMap
        The windows.

    Returns
    -------
    Tensor
        Shape (N_out, C).
    """
    out: torch.Tensor = _Sum.apply(features, pairs)  # type: ignore[no-untyped-call]
    return out


def sparse_average_pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
    """Return the mean of the features over the sites of each window; 0 for a window without sites.

    Parameters
    ----------
    features, pairs
        As in ``sparse_sum_pool``.

    Returns
    -------
    Tensor
        Shape (N_out, C).
    """
    counts = torch.zeros(pairs.out_sites, dtype=torch.long, device=features.device)
    for group in pairs.groups:
        # The number of pairs of each output site.
        counts += group.ends.diff()
    return sparse_sum_pool(features, pairs) / counts.clamp_(min=1)[:, None].to(features.dtype)


def global_sum(features: torch.Tensor, samples: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the sum of the features over the sites of each sample.

    Parameters
    ----------
    features : Tensor
        Shape (N, C).
    samples : Tensor
        Sample of each site, int64 (N,).
    batch_size : int
        Number of samples B.

    Returns
    -------
    Tensor
        Shape (B, C).
    """
    return features.new_zeros(batch_size, features.shape[1]).index_add(0, samples, features)


def global_max(features: torch.Tensor, samples: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the largest feature of each sample; 0 for a sample without sites.

    The gradient goes to the first of equal features.

    Parameters
    ----------
    features, samples, batch_size
        As in :func:`global_sum`.

    Returns
    -------
    Tensor
        Shape (B, C).
    """
    sites, channels = features.shape
    index = samples[:, None].expand(-1, channels)
    x = features.detach()
    largest = x.new_zeros(batch_size, channels).scatter_reduce(0, index, x, "amax", include_self=False)
    rows = torch.arange(sites, device=x.device)[:, None].expand(-1, channels)
    # Of equal maxima the first site gets the gradient, as in torch's pooling. A NaN counts as a maximum.
    candidates = torch.where((x == largest[samples]) | x.isnan(), rows, sites)
    first = torch.full_like(largest, sites, dtype=torch.long).scatter_reduce(0, index, candidates, "amin")
    # Row N is of zeros, for samples without sites.
    return torch.cat([features, features.new_zeros(1, channels)]).gather(0, first)


class _Sum(torch.autograd.Function):
    """Features (N_in, C) -> (N_out, C)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        ctx.pairs = pairs
        out = features.new_zeros(pairs.out_sites, features.shape[1])
        for group in pairs.groups:
            out += group.sum_pairs(features, torch.cat([pairs.pairs[k][0] for k in group.offsets]))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sparse_sum_pool(gradient, ctx.pairs.transposed()), None


class _Max(torch.autograd.Function):
    """Features (N_in, C) -> (N_out, C)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        largest = features.new_zeros(pairs.out_sites, features.shape[1])
        offset_of = torch.full_like(largest, -1, dtype=torch.int32)
        for k, (inputs, outputs) in enumerate(pairs.pairs):
            x, best, at = features.index_select(0, inputs), largest[outputs], offset_of[outputs]
            # The first site of equal ones, and a NaN before any number, as in torch's pooling.
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
            # An output site has one pair at most at each offset, so its gradient goes to one site.
            dx.index_add_(0, inputs, gradient[outputs] * (offset_of[outputs] == k))
        return dx, None
