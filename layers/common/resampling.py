"""Operators whose outputs each take one input position of a dimension, or blend two.

Interpolation and non-constant padding call :func:`resample`. Ranks exchange the positions that their outputs need;
gradients of exchanged positions are added at the owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.communication.collectives import apply
from distconv.kernels.convolution import Range
from distconv.layers.common.input_windows import empty_output, gather_needed_input, spatial_box
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


@dataclass(frozen=True, eq=False)
class Resampling:
    """The input positions and weights of the outputs along one dimension.

    Output ``o`` is ``(1 - weight[o]) * x[low[o]] + weight[o] * x[high[o]]``. Without weights, output ``o`` is
    ``x[low[o]]``, and its gradient is added to position ``high[o]``: torch's nearest-neighbour kernels may use another
    position backward than forward. No ``high[o]`` is below ``low[o]``. Instances compare by identity and are keys of
    cached plans, so functions that create them must be cached.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    weight: tuple[float, ...]

    def needed(self, out: Range) -> Range:
        """Return the range of input indices from which the outputs ``out`` are computed; (0, 0) if there are none."""
        low, high = self.low[out[0] : out[1]], self.high[out[0] : out[1]]
        return (min(low), max(high) + 1) if low else (0, 0)

    def apply(self, block: torch.Tensor, dim: int, out: Range) -> torch.Tensor:
        """Return outputs of this dimension.

        Parameters
        ----------
        block : Tensor
            Along ``dim`` it begins with the first input index that the outputs need.
        dim : int
        out : Range
            Range of output indices.

        Returns
        -------
        Tensor
            ``block`` with the outputs along ``dim``.
        """
        start, _ = self.needed(out)

        def select(index: tuple[int, ...]) -> torch.Tensor:
            return block.index_select(dim, torch.tensor(index[out[0] : out[1]], device=block.device) - start)

        # Nearest neighbour. One selection has the right gradient if forward and backward use the same positions.
        if not self.weight:
            return (
                select(self.high)
                if self.low == self.high
                else apply(_RedirectGradient, select(self.low), select(self.high))
            )
        shape = [1] * block.dim()
        shape[dim] = -1
        # Half precision is blended in float32, as torch's kernels do; the caller rounds once.
        dtype = accumulation_dtype(block.dtype)
        weight = torch.tensor(self.weight[out[0] : out[1]], dtype=dtype, device=block.device).view(shape)
        # Not torch.lerp, which computes NaN if one of the two positions is infinite.
        return select(self.low) * (1 - weight) + select(self.high) * weight


class _RedirectGradient(torch.autograd.Function):
    """The identity on ``values``, whose gradient goes to ``other``."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


@dataclass(frozen=True)
class Resamplings:
    """The resampling of each spatial dimension; None leaves a dimension unchanged."""

    dims: tuple[Resampling | None, ...]

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of input indices from which outputs are computed.

        Parameters
        ----------
        dim : int
            Spatial dimension, from 0.
        out : Range
            Range of output indices.

        Returns
        -------
        Range
        """
        sampling = self.dims[dim]
        return out if sampling is None else sampling.needed(out)


def resample(x: DistTensor, out_shape: torch.Size, samplings: Resamplings) -> DistTensor:
    """Return a tensor resampled along its spatial dimensions.

    Collective: call on every rank.

    Parameters
    ----------
    x : DistTensor
        (N, C, [D, [H,]] W), in balanced blocks.
    out_shape : torch.Size
        Global shape of the result.
    samplings : Resamplings

    Returns
    -------
    DistTensor
        Distributed as ``x``, with its dtype.
    """
    block = gather_needed_input(x, out_shape, samplings)
    local_shape = x.dist.local_shape(out_shape)
    # Only after the exchange, in which this rank may send.
    if 0 in local_shape:
        return DistTensor(empty_output(block, local_shape), x.dist, out_shape)
    # One dimension after the other: multilinear weights are products of the weights of the dimensions.
    for dim, (sampling, out) in enumerate(zip(samplings.dims, spatial_box(x.dist, out_shape), strict=True)):
        if sampling is not None:
            block = sampling.apply(block, dim + 2, out)
    return DistTensor(copy_if_shared(block.to(x.dtype), x), x.dist, out_shape)


def copy_if_shared(block: torch.Tensor, x: DistTensor) -> torch.Tensor:
    """Return a block that does not share the memory of a tensor's block.

    Otherwise an in-place change of a result would change the operator's input.

    Parameters
    ----------
    block : Tensor
    x : DistTensor

    Returns
    -------
    Tensor
        A copy if ``block`` is the block of ``x``; otherwise ``block``.
    """
    return block.clone() if block is x.local else block
