"""The transposed Jacobian of a convolution: its values are weights, so that all samples have the same.

Source: BPPSA, 3.3, 3.4 and D.1 (there for 3 x 3 and padding 1; here for any).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from distconv.errors import ShapeError

from .csr import Pattern, SparseJacobian
from .windows import Two, Windows


def conv2d(  # noqa: PLR0917 (those of F.conv2d, in its order)
    weight: torch.Tensor,
    input_shape: tuple[int, ...],
    stride: Two = 1,
    padding: Two = 0,
    dilation: Two = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return (dy/dx)^T of ``F.conv2d`` on one sample.

    Parameters
    ----------
    weight : Tensor
        Shape (F, C / groups, kH, kW).
    input_shape : tuple of int
        Shape of the sample (C, H, W).
    stride, padding, dilation, groups
        As in ``F.conv2d``.

    Returns
    -------
    Tensor
        torch CSR (C x H x W, F x H_out x W_out), for flattened samples.

    Raises
    ------
    ShapeError
        If the shapes do not fit each other.
    """
    windows = Windows.build(input_shape[-2:], tuple(weight.shape[-2:]), stride, padding, dilation)
    return batched_conv2d(weight, input_shape[-3], windows, groups).to_torch()


def batched_conv2d(
    weight: torch.Tensor, channels: int, windows: Windows, groups: int = 1, *, pruned: bool = False
) -> SparseJacobian:
    """Return (dy/dx)^T of a convolution, which is the same for all samples.

    Parameters
    ----------
    weight : Tensor
        Shape (F, channels / groups, kH, kW).
    channels : int
        Number of input channels.
    windows : Windows
        The geometry.
    groups : int
        As in ``F.conv2d``.
    pruned : bool
        Leave weights that are zero now out of the pattern, which then holds for this choice of weights only.

    Returns
    -------
    SparseJacobian
        With values (1, nnz).

    Raises
    ------
    ShapeError
        If the shapes do not fit each other.
    """
    if weight.dim() != 4 or channels != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ShapeError(
            f"Jacobian of conv2d: weight {tuple(weight.shape)} in {groups} groups does not fit an input of {channels} "
            "channels; pass (F, C / groups, H, W) and (C, H, W)"
        )
    # Bytes, which are a key of the cache.
    kept = (weight != 0).cpu().numpy().tobytes() if pruned else None
    pattern, source = _pattern(windows, tuple(weight.shape), groups, kept, str(weight.device))
    return SparseJacobian(pattern, weight.detach().reshape(1, -1).index_select(1, source))


@lru_cache(maxsize=64)
def _pattern(
    windows: Windows, weight: tuple[int, ...], groups: int, kept: bytes | None, device: str
) -> tuple[Pattern, torch.Tensor]:
    """Return the pattern, and the index of the weight of each non-zero."""
    filters, channels, height, width = weight
    element, inputs, outputs = (index.to(device) for index in windows.pairs())
    area = height * width
    planes = torch.arange(filters * channels, device=device)  # (f, c) of the weight, c within its group
    chosen = (planes[:, None] * area + element).flatten()
    # The input channel: c counts within the group of filter f.
    f, c = planes // channels, planes % channels + (planes // channels) // (filters // groups) * channels
    places_in = windows.extent[0] * windows.extent[1]
    places_out = windows.out[0] * windows.out[1]
    rows = (c[:, None] * places_in + inputs).flatten()
    cols = (f[:, None] * places_out + outputs).flatten()
    if kept is not None:
        # A copy, since torch warns of a buffer that cannot be written to.
        there = torch.frombuffer(bytearray(kept), dtype=torch.bool).to(device)[chosen]
        rows, cols, chosen = rows[there], cols[there], chosen[there]
    pattern, order = Pattern.from_positions(rows, cols, (channels * groups * places_in, filters * places_out))
    # In the order of the sorted pattern, so that values are selected in one call.
    return pattern, chosen[order]
