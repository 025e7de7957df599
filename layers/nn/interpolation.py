"""Interpolation in one to three dimensions.

Nearest and linear modes exchange the positions that outputs need. Area interpolation is adaptive pooling. Bicubic
interpolation and antialiasing gather space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from distconv.dispatch import implements
from distconv.kernels.convolution import Range
from distconv.layers.common.alignment import redistribute_balanced, result_shape
from distconv.layers.common.empty_blocks import run_with_gathered_dims
from distconv.layers.common.input_windows import empty_output, gather_needed_input, spatial_box
from distconv.layers.common.resampling import Resampling, Resamplings, resample
from distconv.tensor import DistTensor

_LINEAR = ("linear", "bilinear", "trilinear")
_AREA: dict[int, Callable[..., Any]] = {
    1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d
}  # fmt: skip


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
    """Compute ``F.interpolate`` of x (N, C, [D, [H,]] W); ``bicubic`` and ``antialias=True`` gather space.

    Parameters
    ----------
    input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        As in ``F.interpolate``.

    Returns
    -------
    DistTensor
    """
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    out_shape = result_shape(F.interpolate, input, *options)
    x = redistribute_balanced(input)
    extents, outs = x.shape[2:], out_shape[2:]
    if mode == "area":
        y: DistTensor = _AREA[len(outs)](x, tuple(outs))
        return y
    if antialias or mode not in (*_LINEAR, "nearest", "nearest-exact"):
        return run_with_gathered_dims(lambda block: F.interpolate(block, *options), x, range(2, x.dim()), out_shape)
    # With an integer factor, positions do not depend on where a block starts: torch's kernel can enlarge the block.
    factors = tuple(out // n if n and out % n == 0 else 0 for n, out in zip(extents, outs, strict=True))
    factor = None if scale_factor is None or recompute_scale_factor else scale_factor
    scales = [factor] * len(extents) if factor is None or isinstance(factor, (int, float)) else list(factor)
    if all(factors) and not align_corners and all(s in (None, f) for s, f in zip(scales, factors, strict=True)):
        return _enlarge(x, out_shape, mode, _EnlargementWindows(factors, tuple(extents), mode in _LINEAR))
    kernel = _InterpolationKernel(mode, len(extents), tuple(extents) != tuple(outs), x.device.type)
    dims = [
        _linear_resampling(kernel, n, out, s, bool(align_corners))
        if mode in _LINEAR
        else _nearest_resampling(kernel, n, out, s)
        for n, out, s in zip(extents, outs, scales, strict=True)
    ]
    return resample(x, out_shape, Resamplings(tuple(dims)))


# -- enlargement by integer factors -----------------------------------------------------------------------------------


def _enlarge(x: DistTensor, out_shape: torch.Size, mode: str, windows: _EnlargementWindows) -> DistTensor:
    """Interpolate by integer factors. Collective.

    torch's kernel enlarges the needed input, and the outputs of the ghosts are cropped.
    """
    block = gather_needed_input(x, out_shape, windows)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(empty_output(block, local_shape), x.dist, out_shape)
    y = F.interpolate(block, scale_factor=[float(f) for f in windows.factors], mode=mode)
    for dim, (out, factor) in enumerate(zip(spatial_box(x.dist, out_shape), windows.factors, strict=True)):
        if out[1] - out[0] < y.shape[dim + 2]:  # the gradient of a view, even of all of y, is a copy
            y = y.narrow(dim + 2, out[0] - windows.needed(dim, out)[0] * factor, out[1] - out[0])
    return DistTensor(y, x.dist, out_shape)


@dataclass(frozen=True)
class _EnlargementWindows:
    """The windows of an enlargement by integer factors; linear modes need one neighbour on each side."""

    factors: tuple[int, ...]
    extents: tuple[int, ...]
    linear: bool

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of inputs of the outputs ``out``."""
        if out[0] >= out[1]:
            return (0, 0)
        factor, ghost = self.factors[dim], int(self.linear)
        return max(0, out[0] // factor - ghost), min(self.extents[dim], (out[1] - 1) // factor + 1 + ghost)


# -- resampling -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _nearest_resampling(kernel: _InterpolationKernel, extent: int, out: int, scale: float | None) -> Resampling:
    """Return the resampling of one dimension by nearest neighbours.

    torch computes the indices in float32. If a size stays the same or doubles although the scale differs, its kernels
    treat each number of dimensions, and gradients, differently. So the indices are obtained by calling torch.
    """
    like: dict[str, Any] = {"dtype": torch.float64, "device": kernel.device}
    # Sample o is the input of output o alone: its gradient shows the position that output o reads backward.
    values = torch.zeros((out, 1, extent), **like, requires_grad=True)
    with torch.enable_grad():
        y = kernel.resample_dimension(values, out, scale)
    (gradient,) = torch.autograd.grad(y, values, torch.eye(out, **like).view(y.shape))
    source = kernel.resample_dimension(torch.arange(extent, **like).view(1, 1, -1), out, scale).long()
    return Resampling(tuple(source.flatten().tolist()), tuple(gradient.flatten(1).argmax(1).tolist()), ())


@lru_cache(maxsize=1024)
def _linear_resampling(
    kernel: _InterpolationKernel, extent: int, out: int, scale: float | None, align_corners: bool
) -> Resampling:
    """Return the resampling of one dimension by linear interpolation."""
    position = torch.arange(out, dtype=torch.float64)
    if align_corners:
        position *= (extent - 1) / (out - 1) if out > 1 else 0.0
    elif out != extent or not _is_copied(kernel, extent, scale):
        position = ((position + 0.5) * (extent / out if scale is None else 1 / scale) - 0.5).clamp_(min=0)
    low = position.floor().long().clamp_(max=extent - 1)
    high = (low + 1).clamp(max=extent - 1)
    return Resampling(tuple(low.tolist()), tuple(high.tolist()), tuple((position - low).tolist()))


@lru_cache(maxsize=1024)
def _is_copied(kernel: _InterpolationKernel, extent: int, scale: float | None) -> bool:
    """Return True if torch copies a dimension whose size does not change.

    Some kernels do so regardless of the scale.
    """
    if scale in (None, 1):
        return True
    values = torch.arange(extent, dtype=torch.float64, device=kernel.device).view(1, 1, -1)
    return torch.equal(kernel.resample_dimension(values, extent, scale), values)


@dataclass(frozen=True)
class _InterpolationKernel:
    """The properties that select torch's kernel, except for the sizes and the scale of one dimension."""

    mode: str
    spatial_dims: int
    """Number of spatial dimensions."""
    changes_size: bool
    """True if any size changes. Otherwise a GPU copies."""
    device: str

    def resample_dimension(self, values: torch.Tensor, out: int, scale: float | None) -> torch.Tensor:
        """Return values (N, 1, extent) resampled to (N, 1, out).

        float64, as this kernel does along its first spatial dimension.
        """
        rest = (1 + self.changes_size,) * (self.spatial_dims - 1)
        size: dict[str, Any] = {"size": (out, *rest)} if scale is None else {"scale_factor": (scale, *map(float, rest))}
        y = F.interpolate(values.view(*values.shape, *(1,) * len(rest)), mode=self.mode, **size)
        return y.flatten(3)[..., 0] if rest else y
