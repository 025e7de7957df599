"""Dense volumes from sparse tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distconv.errors import CoordinateError, ShapeError

from .tensor import SparseTensor


def to_dense(
    x: SparseTensor, size: Sequence[int] | None = None, *, origin: Sequence[int] | None = None
) -> torch.Tensor:
    """The volume ``(B, C, *size)`` with the features at the active sites and zeros elsewhere; differentiable.

    Extents are in cells of the tensor's stride. The first cell is ``origin`` (in steps of the finest grid; zeros if
    left out); ``size`` ends behind the last site if left out.

    Raises
    ------
    CoordinateError
        If a site lies outside.
    ShapeError
        If ``size`` or ``origin`` are not of the tensor's dimension.
    """
    start = torch.tensor((0,) * x.dimension if origin is None else tuple(origin), device=x.device)
    cells = x.coords[:, 1:] - start
    cells = cells.div(x.stride, rounding_mode="floor")
    if size is None:
        size = (cells.amax(0) + 1).clamp_(min=0).tolist() if len(cells) else (0,) * x.dimension
    if not len(size) == len(start) == x.dimension:
        raise ShapeError(f"size {tuple(size)} and origin {start.tolist()} of a volume of {x.dimension} dimensions")
    outside = ((cells < 0) | (cells >= torch.tensor(size, device=x.device))).any(1)
    if count := int(outside.sum()):
        raise CoordinateError(
            f"{count} of {len(cells)} sites lie outside the volume of {tuple(size)} cells at {start.tolist()}; the "
            f"first is {x.coords[outside][0].tolist()} (sample first)"
        )
    volume = x.features.new_zeros(x.batch_size, *size, x.shape[1])
    return volume.index_put((x.coords[:, 0], *cells.unbind(1)), x.features).movedim(-1, 1)


def from_dense(volume: torch.Tensor, *, active: torch.Tensor | None = None, stride: int = 1) -> SparseTensor:
    """The sites of ``volume`` (B, C, ...) where ``active`` (B, ...) holds, by default where any feature is not zero.

    Cell u gets the coordinates stride x u. Differentiable in the features.

    Raises
    ------
    ShapeError
        If ``active`` has another shape.
    """
    if active is None:
        active = (volume != 0).any(1)
    if active.shape != (len(volume), *volume.shape[2:]):
        raise ShapeError(f"active has shape {tuple(active.shape)} for a volume of shape {tuple(volume.shape)}")
    cells = active.nonzero()
    coords = torch.cat([cells[:, :1], cells[:, 1:] * stride], 1)
    features = volume.movedim(1, -1)[cells.unbind(1)]
    return SparseTensor(coords, features, stride, batch_size=len(volume))
