"""Features of a sparse tensor at points between its sites.

A point belongs to the rank that owns the lower corner of its cell. There the features at all corners are available from
a kernel map of 2^D offsets, and the result returns to the rank of the point::

    1. points to the owners of their lower corners
    2. features at the 2^D corners, by a kernel map (with a halo for corners of other ranks)
    3. sums of the features weighted by the distances
    4. results back to the ranks of the points
"""

from __future__ import annotations

import torch

from distconv.errors import CoordinateError, ShapeError
from distconv.kernels.sparse import box_offsets

from .coordinate_manager import CoordinateManager, Sites
from .tensor import SparseTensor
from .windows import check_input


def interpolate(x: SparseTensor, points: torch.Tensor) -> torch.Tensor:
    """Return features that are multilinearly interpolated between the sites around each point.

    Sites that are not active count as zeros. Differentiable in the features and in the points. Collective for a tensor
    that is split over ranks: call on every rank.

    Parameters
    ----------
    x : SparseTensor
        Features (N, C).
    points : Tensor
        Floating point (M, 1 + D): the index of the sample, and coordinates in cells of the finest grid, as the
        coordinates of sites. For a split tensor a DistTensor in any blocks, or a plain tensor that is identical on all
        ranks.

    Returns
    -------
    Tensor
        (M, C). For a split tensor a DistTensor with the rows of ``points``, which are in balanced blocks if ``points``
        is a plain tensor.

    Raises
    ------
    ShapeError
        If the points are not floating point (M, 1 + D).
    CoordinateError
        If a point is not finite, or its sample does not exist.
    """
    check_input(x)
    if points.ndim != 2 or points.shape[1] != 1 + x.dimension or not points.is_floating_point():
        raise ShapeError(
            f"interpolate: points are {points.dtype} of shape {tuple(points.shape)}. Pass floating-point numbers "
            f"(M, {1 + x.dimension}), the index of the sample first."
        )
    manager, stride = x.coordinate_manager, torch.tensor(x.sites.stride, device=x.device)
    low, high = _bounds(x.sites, manager)

    def corner_of(rows: torch.Tensor) -> torch.Tensor:
        # Points far from all sites move to a cell without sites around it. So their coordinates do not overflow.
        cells = (rows[:, 1:] / stride).floor().clamp(low - 2, high + 2).long()
        return torch.cat([rows[:, :1].long(), cells * stride], 1)

    def at_points(rows: torch.Tensor) -> torch.Tensor:
        corners, corner = corner_of(rows.detach()).unique(dim=0, return_inverse=True)
        outputs = Sites(corners, x.sites.stride, is_sorted=True)
        offsets = box_offsets((2,) * x.dimension, (0,) * x.dimension)
        features, pairs = manager.gather_needed(x.features, x.sites, outputs, offsets)
        # A row of zeros stands for all sites that are not active.
        padded = torch.cat([features, features.new_zeros(1, features.shape[1])])
        positions = rows[:, 1:] / stride
        upper = positions - positions.detach().floor()
        result = features.new_zeros(len(rows), features.shape[1])
        for offset, (sites, present) in zip(offsets, pairs.pairs, strict=True):
            row_of = torch.full((len(corners),), len(features), device=x.device).index_put((present,), sites)
            step = torch.tensor(offset, device=x.device)
            weights = torch.where(step == 1, upper, 1 - upper).prod(1, keepdim=True)
            result = result + weights.to(features.dtype) * padded[row_of[corner]]
        return result

    points = manager.split_rows(points)
    samples, finite = manager.local_rows(points.detach())[:, 0], manager.local_rows(points.detach()).isfinite().all()
    valid = finite and bool(((samples >= 0) & (samples < manager.batch_size) & (samples == samples.floor())).all())
    if not all(manager.gather_values(bool(valid))):
        raise CoordinateError(
            f"interpolate: a point is not finite, or its sample is not an index below {manager.batch_size}. Remove it."
        )
    return manager.at_owners(points, corner_of, at_points)


def _bounds(sites: Sites, manager: CoordinateManager) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest cell of all sites along each dimension. Collective."""
    space = sites.coords[:, 1:]
    ends = [(space.amin(0).tolist(), space.amax(0).tolist())] if len(space) else []
    found = [each for ends_of_rank in manager.gather_values(ends) for each in ends_of_rank]
    low = [min(along) for along in zip(*(low for low, _ in found), strict=True)] or [0] * space.shape[1]
    high = [max(along) for along in zip(*(high for _, high in found), strict=True)] or [0] * space.shape[1]
    stride = torch.tensor(sites.stride)
    return tuple((torch.tensor(end) // stride).to(space.device) for end in (low, high))  # type: ignore[return-value]
