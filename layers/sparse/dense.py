"""Dense volumes from sparse tensors, and sparse tensors from volumes.

Both directions are differentiable, and also convert between split sparse tensors and DistTensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distconv.errors import CoordinateError, ShapeError
from distconv.tensor import DistTensor

from .distributed import sparse_from_blocks
from .tensor import SparseTensor


def to_dense(
    x: SparseTensor, size: Sequence[int] | None = None, *, origin: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the dense volume with the features at the active sites and zeros elsewhere.

    Differentiable. Collective for a tensor that is split over ranks: call on every rank.

    Parameters
    ----------
    x : SparseTensor
        The sites and their features.
    size : sequence of int, optional
        Number of cells of the tensor's stride along each dimension (default: the spatial shape of ``x``, or up to the
        last site if it has none).
    origin : sequence of int, optional
        Coordinates of the first cell (default: zeros).

    Returns
    -------
    Tensor
        ``(B, C, *size)``; a DistTensor over the same grid if ``x`` is split over ranks.

    Raises
    ------
    CoordinateError
        If a site lies outside.
    ShapeError
        If ``size`` or ``origin`` does not have an entry for each dimension.
    """
    manager, coords = x.coordinate_manager, x.sites.coords
    origin = (0,) * x.dimension if origin is None else tuple(origin)
    start = torch.tensor((0, *origin), device=coords.device)
    step = torch.tensor((1, *x.sites.stride), device=coords.device)
    if len(origin) != x.dimension or (size is not None and len(size) != x.dimension):
        size_text = "" if size is None else f"size {tuple(size)} and "
        raise ShapeError(
            f"to_dense: {size_text}origin {list(origin)} for a volume of {x.dimension} dimensions. Pass one entry "
            "for each."
        )
    cells = (coords - start).div(step, rounding_mode="floor")
    if size is None and not any(origin):
        size = x.spatial_shape
    if size is None:
        ends = manager.gather_values((cells[:, 1:].amax(0) + 1).tolist() if len(cells) else [0] * x.dimension)
        size = [max(0, *along) for along in zip(*ends, strict=True)]
    # Collected from all ranks, so that all raise the same error before any of them sends features.
    outside = ((cells[:, 1:] < 0) | (cells[:, 1:] >= torch.tensor(size, device=coords.device))).any(1)
    outside_sites = [
        each for each in manager.gather_values((int(outside.sum()), coords[outside][:1].tolist())) if each[0]
    ]
    if outside_sites:
        raise CoordinateError(
            f"{sum(count for count, _ in outside_sites)} of {x.shape[0]} sites lie outside the volume of "
            f"{tuple(size)} cells "
            f"at {list(origin)}. The first is {outside_sites[0][1][0]} (sample first)."
        )
    return manager.dense_volume(x.features, cells, x.sites.stride, origin, size)


def from_dense(
    volume: torch.Tensor, *, active: torch.Tensor | None = None, stride: int | Sequence[int] = 1
) -> SparseTensor:
    """Return the sites of a dense volume at which any feature is not zero, with these features.

    Differentiable in the features. Collective for a DistTensor: call on every rank.

    Parameters
    ----------
    volume : Tensor
        Features ``(B, C, ...)``.
    active : Tensor, optional
        Booleans ``(B, ...)``: the sites to take instead of those with features that are not zero.
    stride : int or sequence of int
        Edge of a cell in steps of the finest grid: one number, or one for each dimension. Cell ``u`` gets the
        coordinates ``stride * u``.

    Returns
    -------
    SparseTensor
        The sites of a DistTensor are split over its grid by the blocks of the volume.

    Raises
    ------
    ShapeError
        If ``active`` has another shape.
    """
    if active is None:
        active = (volume != 0).any(1)
    if active.shape != (len(volume), *volume.shape[2:]):
        raise ShapeError(
            f"from_dense: active has shape {tuple(active.shape)} for a volume of shape {tuple(volume.shape)}"
        )
    if isinstance(volume, DistTensor):
        return sparse_from_blocks(volume, active, stride)
    cells = active.nonzero()
    coords = torch.cat([cells[:, :1], cells[:, 1:] * torch.tensor(stride, device=cells.device)], 1)
    features = volume.movedim(1, -1)[cells.unbind(1)]
    return SparseTensor(coords, features, stride, batch_size=len(volume))
