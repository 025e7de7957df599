"""Random point clouds, and their dense convolutions as references."""

from __future__ import annotations

import itertools
import random

import torch
import torch.nn.functional as F

from distconv.layers.sparse import SparseTensor

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
FAR_SITES = 12
"""Half the extent of the dense volumes, a multiple of all strides, beyond what sites and kernels reach."""


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_coords(rng, dimension, *, samples=(0, 2), stride=1, sites=12, reach=3):
    """Distinct rows in no order; samples that are not named have none."""
    strides = (stride,) * dimension if isinstance(stride, int) else stride
    rows = {(rng.choice(samples), *(s * rng.randint(-reach, reach) for s in strides)) for _ in range(sites)}
    rows = sorted(rows)
    rng.shuffle(rows)
    return torch.tensor(rows, dtype=torch.long).reshape(-1, 1 + dimension)


def random_cloud(rng, dimension, channels, *, stride=1, sites=12, dtype=torch.float64):
    coords = random_coords(rng, dimension, stride=stride, sites=sites)
    features = normal(len(coords), channels, seed=rng.randrange(1 << 30)).to(dtype).requires_grad_()
    return SparseTensor(coords, features, stride, batch_size=4)


def volume(x, far=FAR_SITES):
    """The cells of ``x`` (B, C, 2 far, ...), that at the origin in the middle."""
    dense = x.features.new_zeros(x.batch_size, *[2 * far] * x.dimension, x.shape[1])
    cells = x.coords[:, 1:] // torch.tensor(x.sites.stride) + far
    return dense.index_put((x.coords[:, 0], *cells.unbind(1)), x.features).movedim(-1, 1)


def values_at(dense, coords, origin):
    """Rows (N, C) of a dense volume at cells ``coords`` when its first cell is -``origin`` (one for each dimension)."""
    cells = coords[:, 1:] + torch.tensor(origin)
    return dense.movedim(1, -1)[(coords[:, 0], *cells.unbind(1))]


def dense_convolution(x, layer, out):
    """Return the results of torch's own convolution at the sites of ``out``."""
    kernel, d, s = layer.weight.shape[2:], layer.dilation, layer.stride
    options = {"stride": s, "dilation": d, "groups": layer.groups}
    before = [-min(steps) for steps in zip(*layer.offsets, strict=True)]
    cells = torch.cat([out.coords[:, :1], out.coords[:, 1:] // torch.tensor(out.sites.stride)], 1)
    if layer.transposed:
        dense = TRANSPOSED[x.dimension](volume(x), layer.weight.contiguous(), layer.bias, **options)
        return values_at(dense, cells, [step * FAR_SITES + p for p, step in zip(before, s, strict=True)])
    borders = [(p, e * (k - 1) - p) for p, k, e in zip(before, kernel, d, strict=True)]
    padded = F.pad(volume(x), list(itertools.chain(*borders[::-1])))
    dense = FORWARD[x.dimension](padded, layer.weight.contiguous(), layer.bias, **options)
    return values_at(dense, cells, [FAR_SITES // step for step in s])


def brute_force(x, layer, out):
    """The sum over the offsets of what a dictionary of the input's sites holds there, site by site."""
    unit = out.sites.stride if layer.transposed else x.sites.stride
    rows = {tuple(row): n for n, row in enumerate(x.coords.tolist())}
    sign = -1 if layer.transposed else 1
    weight = torch.stack([torch.block_diag(*matrix.reshape(-1, *matrix.shape[-2:])) for matrix in layer.matrices], 2)
    features = []
    for sample, *u in out.coords.tolist():
        total = torch.zeros(layer.out_channels, dtype=x.dtype) if layer.bias is None else layer.bias
        for k, offset in enumerate(layer.offsets):
            site = (sample, *(c + sign * step * o for c, o, step in zip(u, offset, unit, strict=True)))
            if site in rows:
                total = total + x.features[rows[site]] @ weight[:, :, k]
        features.append(total)
    stacked = torch.stack(features) if features else x.features.new_zeros(0, layer.out_channels)
    return stacked + 0 * (
        x.features.sum() + layer.weight.sum()
    )  # a gradient for each, also where no site meets another


def rng_of(*seed):
    return random.Random(repr(seed))
