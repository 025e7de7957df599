"""Transposed Jacobians of max and average pooling, as sparse matrices.

:func:`distconv.kernels.scan.backpropagate` takes them. The module contains no communication.

Source: BPPSA, 3.3 and D.3. The paper has windows that do not overlap; here they may overlap.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from distconv.errors import ShapeError

from .convolution import batched_conv2d
from .csr import Pattern, SparseJacobian
from .windows import Windows


def max_pool2d(indices: torch.Tensor, input_shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return (dy/dx)^T of ``F.max_pool2d`` on one sample.

    Parameters
    ----------
    indices : Tensor
        Indices of the maxima that ``F.max_pool2d`` returns (C, H_out, W_out).
    input_shape : tuple of int
        Shape of the sample (C, H, W).
    dtype : torch.dtype
        The dtype of the result.

    Returns
    -------
    Tensor
        torch CSR (C x H x W, C x H_out x W_out), with a one for each output. The pattern depends on the sample.

    Raises
    ------
    ShapeError
        If the shapes do not fit each other.
    """
    channels, height, width = input_shape[-3:]
    if indices.numel() != channels * indices.shape[-2] * indices.shape[-1]:
        raise ShapeError(
            f"Jacobian of max_pool2d: indices {tuple(indices.shape)} are not (C, H_out, W_out) of one sample "
            f"(C, H, W) = {tuple(input_shape)}. Use batched_max_pool2d for several samples"
        )
    # Indices of torch count within a plane, and rows of the matrix across all planes.
    planes = torch.arange(channels, device=indices.device)[:, None] * (height * width)
    rows = (planes + indices.reshape(channels, -1)).flatten()
    cols = torch.arange(len(rows), device=indices.device)
    pattern, _ = Pattern.from_positions(rows, cols, (channels * height * width, len(cols)))
    return SparseJacobian(pattern, torch.ones(1, pattern.nnz, dtype=dtype, device=indices.device)).to_torch()


def batched_max_pool2d(indices: torch.Tensor, windows: Windows, dtype: torch.dtype = torch.float32) -> SparseJacobian:
    """Return (dy/dx)^T of max pooling for each sample, with one pattern for all samples.

    The pattern has all inputs that a window can choose. The other elements are the paper's guaranteed zeros.

    Parameters
    ----------
    indices : Tensor
        Indices of the maxima (B, C, H_out, W_out).
    windows : Windows
        The geometry.
    dtype : torch.dtype
        The dtype of the result.

    Returns
    -------
    SparseJacobian
        Values (B, nnz), 1 at the chosen input of each output and 0 elsewhere; pattern
        (C x H x W, C x H_out x W_out).

    Raises
    ------
    ShapeError
        If ``indices`` do not have the output shape of ``windows``.
    """
    if tuple(indices.shape[-2:]) != windows.out:
        raise ShapeError(
            f"Jacobian of max_pool2d: indices {tuple(indices.shape)} are not (B, C, H_out, W_out) with H_out and W_out "
            f"{windows.out}, which {windows} give"
        )
    pattern, inputs = _pattern(windows, indices.shape[1], str(indices.device))
    # The pattern has all inputs of a window. Those that are not the maximum have the value 0.
    chosen = indices.flatten(1).index_select(1, pattern.col) == inputs
    return SparseJacobian(pattern, chosen.to(dtype))


def batched_avg_pool2d(
    channels: int, windows: Windows, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> SparseJacobian:
    """Return (dy/dx)^T of average pooling. The mean includes the padding.

    Average pooling is a convolution of each channel with constant weights, so all samples share the Jacobian.

    Parameters
    ----------
    channels : int
        Number of channels C.
    windows : Windows
        The geometry.
    dtype : torch.dtype
        The dtype of the result.
    device : torch.device or str
        The device of the result.

    Returns
    -------
    SparseJacobian
        Values (1, nnz); pattern (C x H x W, C x H_out x W_out).
    """
    height, width = windows.kernel
    weight = torch.full((channels, 1, height, width), 1 / (height * width), dtype=dtype, device=device)
    return batched_conv2d(weight, channels, windows, groups=channels)


@lru_cache(maxsize=64)
def _pattern(windows: Windows, channels: int, device: str) -> tuple[Pattern, torch.Tensor]:
    """Return the pattern of all inputs that a window can choose, and each non-zero's input within its plane."""
    _, inputs, outputs = (index.to(device) for index in windows.pairs())
    places_in, places_out = windows.extent[0] * windows.extent[1], windows.out[0] * windows.out[1]
    planes = torch.arange(channels, device=device)[:, None]
    rows, cols = (planes * places_in + inputs).flatten(), (planes * places_out + outputs).flatten()
    pattern, order = Pattern.from_positions(rows, cols, (channels * places_in, channels * places_out))
    return pattern, rows[order] % places_in
