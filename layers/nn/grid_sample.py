"""Sampling at given points, and the points of affine maps.

A point may be anywhere in space, so space is gathered; samples, channels and points stay split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from distconv.communication.collectives import with_grad_allreduce
from distconv.dispatch import implements
from distconv.distribution import Distribution
from distconv.layers.common.alignment import as_distributed, result_shape, to_probed_dtype
from distconv.layers.common.input_windows import empty_output
from distconv.tensor import DistTensor


@implements(F.grid_sample, tensors="input grid")
def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> DistTensor:
    """Compute ``F.grid_sample`` of x (N, C, [D,] H, W) at points (N, [D,] H, W, 2 or 3).

    Every rank gathers the space of its samples and channels, and samples it at its own points. If the points' space is
    not split, points and result are split as x is.

    Parameters
    ----------
    input, grid, mode, padding_mode, align_corners
        As in ``F.grid_sample``.

    Returns
    -------
    DistTensor
    """
    out_shape = result_shape(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    like = input if isinstance(input, DistTensor) else grid
    assert isinstance(like, DistTensor)

    def sample_one_point(block: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(block, block.new_zeros(1, 1, 1, 2), align_corners=True)

    x, points = (to_probed_dtype(as_distributed(t, like.grid), sample_one_point, 1, 1, 1, 1) for t in (input, grid))
    if not isinstance(input, DistTensor):
        x = x.redistribute(points.dist.with_axes([points.dist.axes[0], *(None,) * (x.dim() - 1)]).balanced())
    # Samples and channels of the result are split as those of x, and its space as the points' or as that of x.
    space = points.dist.axes[1:-1] if any(points.dist.split[1:-1]) else x.dist.axes[2:]
    outer = x.dist.axes[:2]
    out = Distribution(x.grid, [*outer, *(None if a in outer else a for a in space)])
    block = x.redistribute(out.replicate(range(2, x.dim()))).local
    # Ranks with other points contribute to the gradient of the same x, and ranks with other channels to that of the
    # same points.
    block = with_grad_allreduce(block, x.grid, out.split[2:])
    own_points = points.redistribute(out.with_axes([out.axes[0], *out.axes[2:], None])).local
    own_points = with_grad_allreduce(own_points, x.grid, [out.split[1]])
    local_shape = (*block.shape[:2], *own_points.shape[1:-1])
    if 0 in local_shape:
        # Connected to both operands, whose gradients are all-reduced.
        y = empty_output(block, local_shape) + empty_output(own_points, local_shape)
    else:
        y = F.grid_sample(block, own_points, mode, padding_mode, align_corners)
    return DistTensor(y, out, out_shape)


@implements(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, tensors="input grid")
def grid_sampler(
    input: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> DistTensor:
    """Compute ``torch.grid_sampler``: ``F.grid_sample`` with numbers for the modes.

    Parameters
    ----------
    input, grid, interpolation_mode, padding_mode, align_corners
        As in ``torch.grid_sampler``.

    Returns
    -------
    DistTensor
    """
    mode, padding = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return grid_sample(input, grid, mode[interpolation_mode], padding[padding_mode], align_corners)


@implements(F.affine_grid)
def affine_grid(theta: DistTensor, size: Sequence[int], align_corners: bool | None = None) -> DistTensor:
    """Compute ``F.affine_grid`` of theta (N, 2, 3) or (N, 3, 4): points (N, [D,] H, W, 2 or 3), split over samples.

    Parameters
    ----------
    theta, size, align_corners
        As in ``F.affine_grid``.

    Returns
    -------
    DistTensor
    """
    shape = result_shape(F.affine_grid, theta, tuple(size), align_corners)
    x = theta.replicated([1, 2])
    local_shape = (x.local.shape[0], *shape[1:])
    if 0 in local_shape:
        points = empty_output(x.local, local_shape)
    else:
        points = F.affine_grid(x.local, [local_shape[0], *size[1:]], align_corners)
    return DistTensor(points, x.dist.with_axes([x.dist.axes[0], *(None,) * (len(shape) - 1)]), shape)
