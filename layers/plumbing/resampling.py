"""Dimensions of which each output picks one input position, or blends two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.communication.collectives import apply
from distconv.kernels.convolution import Range
from distconv.layers.plumbing.input_windows import needed_block, no_outputs, spatial_box
from distconv.precision import accumulation_dtype
from distconv.tensor import DistTensor


@dataclass(frozen=True, eq=False)
class Resampling:
    """How one dimension is sampled: output ``o`` blends input ``low[o]`` and ``high[o]``, the latter by ``weight[o]``.

    No ``high[o]`` lies before ``low[o]``; without weights output ``o`` is input ``low[o]``, and its gradient goes to
    ``high[o]``. Equal by identity, since those that make it cache it.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    weight: tuple[float, ...]

    def needed(self, out: Range) -> Range:
        """Range of input indices from which the outputs ``out`` are made; (0, 0) if there are none."""
        low, high = self.low[out[0] : out[1]], self.high[out[0] : out[1]]
        return (min(low), max(high) + 1) if low else (0, 0)

    def apply(self, block: torch.Tensor, dim: int, out: Range) -> torch.Tensor:
        """The outputs ``out`` along ``dim``, from a block that begins with the first index they need."""
        start, _ = self.needed(out)

        def taken(index: tuple[int, ...]) -> torch.Tensor:
            return block.index_select(dim, torch.tensor(index[out[0] : out[1]], device=block.device) - start)

        if not self.weight:
            return taken(self.high) if self.low == self.high else apply(_Instead, taken(self.low), taken(self.high))
        shape = [1] * block.dim()
        shape[dim] = -1
        dtype = accumulation_dtype(block.dtype)
        weight = torch.tensor(self.weight[out[0] : out[1]], dtype=dtype, device=block.device).view(shape)
        # Not torch.lerp, which makes NaN of a neighbour's infinity.
        return taken(self.low) * (1 - weight) + taken(self.high) * weight


class _Instead(torch.autograd.Function):
    """``values``, whose gradient is that of ``other``."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


@dataclass(frozen=True)
class Resamplings:
    """One sampling per spatial dimension; None leaves a dimension as it is."""

    dims: tuple[Resampling | None, ...]

    def needed(self, dim: int, out: Range) -> Range:
        """Range of indices of ``dim`` from which the outputs ``out`` are made."""
        sampling = self.dims[dim]
        return out if sampling is None else sampling.needed(out)


def resampled(x: DistTensor, out_shape: torch.Size, samplings: Resamplings) -> DistTensor:
    """The tensor of ``out_shape`` that ``samplings`` take from x (N, C, ...) with balanced blocks."""
    block = needed_block(x, out_shape, samplings)
    local_shape = x.dist.local_shape(out_shape)
    if 0 in local_shape:
        return DistTensor(no_outputs(block, local_shape), x.dist, out_shape)
    for dim, (sampling, out) in enumerate(zip(samplings.dims, spatial_box(x.dist, out_shape), strict=True)):
        if sampling is not None:
            block = sampling.apply(block, dim + 2, out)
    return DistTensor(own_memory(block.to(x.dtype), x), x.dist, out_shape)


def own_memory(block: torch.Tensor, x: DistTensor) -> torch.Tensor:
    """``block``, never the memory of ``x``: changing the result in place must not change the input."""
    return block.clone() if block is x.local else block
