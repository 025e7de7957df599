"""Operators whose output picks or blends input positions: interpolation, padding, sampling at given points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.functions import enter
from distconv.kernels.convolution import Geometry, Range
from distconv.layers.alignment import as_cast_for, as_distributed, balanced_input, result_shape
from distconv.layers.pooling import whole_space
from distconv.layers.windows import needed_block, no_outputs, spatial_box
from distconv.tensor import DistTensor

_LINEAR = ("linear", "bilinear", "trilinear")
_AREA: dict[int, Callable[..., Any]] = {
    1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Sampling:
    """How one dimension is sampled: output ``o`` blends input ``low[o]`` and ``high[o]``, the latter by ``weight[o]``.

    Equal by identity, since those that make it cache it.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    weight: tuple[float, ...]

    def needed(self, out: Range) -> Range:
        low, high = self.low[out[0] : out[1]], self.high[out[0] : out[1]]
        return (min(low), max(high) + 1) if low else (0, 0)

    def apply(self, block: torch.Tensor, dim: int, out: Range) -> torch.Tensor:
        start, _ = self.needed(out)

        def taken(index: tuple[int, ...]) -> torch.Tensor:
            return block.index_select(dim, torch.tensor(index[out[0] : out[1]], device=block.device) - start)

        if not self.weight:
            return taken(self.low)
        shape = [1] * block.dim()
        shape[dim] = -1
        dtype = torch.float32 if block.dtype in (torch.float16, torch.bfloat16) else block.dtype
        weight = torch.tensor(self.weight[out[0] : out[1]], dtype=dtype, device=block.device).view(shape)
        # Not torch.lerp, which makes NaN of a neighbour's infinity.
        return taken(self.low) * (1 - weight) + taken(self.high) * weight


@dataclass(frozen=True)
class _Samplings:
    """One sampling per spatial dimension; None leaves a dimension as it is."""

    dims: tuple[_Sampling | None, ...]

    def needed(self, dim: int, out: Range) -> Range:
        sampling = self.dims[dim]
        return out if sampling is None else sampling.needed(out)


def _sampled(x: DistTensor, out_shape: torch.Size, samplings: _Samplings) -> DistTensor:
    block = needed_block(x, out_shape, samplings)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(no_outputs(block, local_shape), x.dist, out_shape)
    for dim, (sampling, out) in enumerate(zip(samplings.dims, spatial_box(x.dist, out_shape), strict=True)):
        if sampling is not None:
            block = sampling.apply(block, dim + 2, out)
    return DistTensor(_own(block.to(x.dtype), x), x.dist, out_shape)


def _own(block: torch.Tensor, x: DistTensor) -> torch.Tensor:
    """``block``, never the memory of ``x``: changing the result in place must not change the input."""
    return block.clone() if block is x.local else block


# -- interpolation ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _nearest(mode: str, extent: int, out: int, scale: float | None) -> _Sampling:
    # torch computes these indices in float32; asking it is the way to get the same ones.
    size = {"size": out} if scale is None else {"scale_factor": scale}
    index = F.interpolate(torch.arange(extent, dtype=torch.float64)[None, None], mode=mode, **size)
    low = tuple(int(i) for i in index.flatten())
    return _Sampling(low, low, ())


@lru_cache(maxsize=1024)
def _linear(extent: int, out: int, scale: float | None, align_corners: bool) -> _Sampling:
    position = torch.arange(out, dtype=torch.float64)
    if align_corners:
        position *= (extent - 1) / (out - 1) if out > 1 else 0.0
    else:
        position = ((position + 0.5) * (extent / out if scale is None else 1 / scale) - 0.5).clamp_(min=0)
    low = position.floor().long().clamp_(max=extent - 1)
    high = (low + 1).clamp(max=extent - 1)
    return _Sampling(tuple(low.tolist()), tuple(high.tolist()), tuple((position - low).tolist()))


@dataclass(frozen=True)
class _Enlarged:
    """Needed input when every dimension grows by a whole factor: linear modes blend with one neighbour per side."""

    factors: tuple[int, ...]
    extents: tuple[int, ...]
    linear: bool

    def needed(self, dim: int, out: Range) -> Range:
        if out[0] >= out[1]:
            return (0, 0)
        factor, ghost = self.factors[dim], int(self.linear)
        return max(0, out[0] // factor - ghost), min(self.extents[dim], (out[1] - 1) // factor + 1 + ghost)


def _enlarge(x: DistTensor, out_shape: torch.Size, mode: str, rule: _Enlarged) -> DistTensor:
    """Interpolation by whole factors: torch's own kernel on the needed box, less what only neighbours want."""
    block = needed_block(x, out_shape, rule)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(no_outputs(block, local_shape), x.dist, out_shape)
    y = F.interpolate(block, scale_factor=[float(f) for f in rule.factors], mode=mode)
    for dim, (out, factor) in enumerate(zip(spatial_box(x.dist, out_shape), rule.factors, strict=True)):
        y = y.narrow(dim + 2, out[0] - rule.needed(dim, out)[0] * factor, out[1] - out[0])
    return DistTensor(y, x.dist, out_shape)


@implements(F.interpolate, F.upsample)
def interpolate(
    input: DistTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> DistTensor:
    """``F.interpolate`` of x (N, C, [D, [H,]] W); ``bicubic``, and ``antialias=True``, gather space."""
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    out_shape = result_shape(F.interpolate, input, *options)
    x = balanced_input(input)
    extents, outs = x.shape[2:], out_shape[2:]
    if mode == "area":
        y: DistTensor = _AREA[len(outs)](x, tuple(outs))
        return y
    if antialias or mode not in (*_LINEAR, "nearest", "nearest-exact"):
        return whole_space(F.interpolate, x, *options)
    factors = tuple(out // n if n and out % n == 0 else 0 for n, out in zip(extents, outs, strict=True))
    given = None if scale_factor is None or recompute_scale_factor else scale_factor
    scales = [given] * len(extents) if given is None or isinstance(given, (int, float)) else list(given)
    if all(factors) and not align_corners and all(s in (None, f) for s, f in zip(scales, factors, strict=True)):
        return _enlarge(x, out_shape, mode, _Enlarged(factors, tuple(extents), mode in _LINEAR))
    if mode in _LINEAR:
        dims = [_linear(n, out, s, bool(align_corners)) for n, out, s in zip(extents, outs, scales, strict=True)]
    else:
        dims = [_nearest(mode, n, out, s) for n, out, s in zip(extents, outs, scales, strict=True)]
    return _sampled(x, out_shape, _Samplings(tuple(dims)))


# -- padding ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _padding(mode: str, extent: int, front: int, behind: int) -> _Sampling | None:
    if not front and not behind:
        return None
    index = F.pad(torch.arange(extent, dtype=torch.float64)[None, None], (front, behind), mode=mode)
    low = tuple(int(i) for i in index.flatten())
    return _Sampling(low, low, ())


@implements(F.pad, torch._C._nn.pad)
def pad(input: DistTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """``F.pad``: constant (also negative), reflect, replicate or circular."""
    out_shape = result_shape(F.pad, input, tuple(pad), mode, value)
    if mode != "constant" and input.dim() == len(pad) // 2 + 1:
        return F.pad(input.unsqueeze(0), tuple(pad), mode, value).squeeze(0)
    fronts = [0] * input.dim()
    behinds = [0] * input.dim()
    for i, dim in enumerate(range(input.dim() - 1, input.dim() - 1 - len(pad) // 2, -1)):
        fronts[dim], behinds[dim] = pad[2 * i], pad[2 * i + 1]
    if any(fronts[:2]) or any(behinds[:2]) or input.dim() < 3:
        padded = [d for d in range(input.dim()) if fronts[d] or behinds[d]]
        whole = input.replicated(padded)
        return DistTensor(F.pad(whole.local, pad, mode, value), whole.dist, out_shape).redistribute(
            input.dist.balanced()
        )
    x = balanced_input(input)
    count = input.dim() - 2
    if mode == "constant":
        shift = Geometry((1,) * count, (1,) * count, tuple(fronts[2:]), (1,) * count)
        block = needed_block(x, out_shape, shift, 0.0 if value is None else value)
        local_shape = x.dist.local_shape(out_shape)
        y = no_outputs(block, local_shape) if 0 in local_shape else _own(block, x)
        return DistTensor(y, x.dist, out_shape)
    x = as_cast_for(x, lambda block: F.pad(block, (0, 0) * count, mode), *(1,) * (count + 2))
    dims = [_padding(mode, n, f, b) for n, f, b in zip(x.shape[2:], fronts[2:], behinds[2:], strict=True)]
    return _sampled(x, out_shape, _Samplings(tuple(dims)))


# -- sampling at given points -----------------------------------------------------------------------------------------


@implements(F.grid_sample)
def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> DistTensor:
    """``F.grid_sample`` of x (N, C, [D,] H, W) at points (N, [D,] H, W, 2 or 3), which may be anywhere in space.

    Every rank gathers the space of its samples and channels and samples it at its own points. If the points' space is
    not split, points and result are split as x is.
    """
    out_shape = result_shape(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    like = input if isinstance(input, DistTensor) else grid
    assert isinstance(like, DistTensor)
    x, points = (as_cast_for(as_distributed(t, like.grid), _sampled_probe, 1, 1, 1, 1) for t in (input, grid))
    if not isinstance(input, DistTensor):
        x = x.redistribute(points.dist.with_axes([points.dist.axes[0], *(None,) * (x.dim() - 1)]).balanced())
    space = points.dist.axes[1:-1] if any(points.dist.split[1:-1]) else x.dist.axes[2:]
    taken = x.dist.axes[:2]
    out = Distribution(x.grid, [*taken, *(None if a in taken else a for a in space)])
    whole = x.redistribute(out.replicate(range(2, x.dim()))).local
    whole = enter(whole, x.grid, out.split[2:])
    places = points.redistribute(out.with_axes([out.axes[0], *out.axes[2:], None])).local
    places = enter(places, x.grid, [out.split[1]])
    return DistTensor(_sampled_at(whole, places, mode, padding_mode, align_corners), out, out_shape)


def _sampled_probe(block: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(block, block.new_zeros(1, 1, 1, 2), align_corners=True)


def _sampled_at(whole: torch.Tensor, places: torch.Tensor, *options: Any) -> torch.Tensor:
    shape = (*whole.shape[:2], *places.shape[1:-1])
    if 0 in shape:
        return no_outputs(whole, shape) + no_outputs(places, shape)
    return F.grid_sample(whole, places, *options)


@implements(F.affine_grid)
def affine_grid(theta: DistTensor, size: Sequence[int], align_corners: bool | None = None) -> DistTensor:
    """``F.affine_grid`` of theta (N, 2, 3) or (N, 3, 4): points (N, [D,] H, W, 2 or 3), split over samples."""
    shape = result_shape(F.affine_grid, theta, tuple(size), align_corners)
    x = theta.replicated([1, 2])
    local_shape = (x.local.shape[0], *shape[1:])
    if 0 in local_shape:
        points = no_outputs(x.local, local_shape)
    else:
        points = F.affine_grid(x.local, [local_shape[0], *size[1:]], align_corners)
    return DistTensor(points, x.dist.with_axes([x.dist.axes[0], *(None,) * (len(shape) - 1)]), shape)
