"""Pooling over windows, and over all sites of a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from distconv.kernels.sparse import (
    KernelMap,
    box_offsets,
    global_max,
    global_sum,
    sparse_average_pool,
    sparse_max_pool,
    sparse_sum_pool,
)

from .tensor import SparseTensor
from .windows import check_input, check_window, extents


class _WindowPool(nn.Module):
    """Pooling of the active sites in windows [stride u - padding, stride u - padding + kernel_size) of cells.

    Output sites u are those of the input with stride 1, and with a stride its cells that hold sites. ``stride`` is
    ``kernel_size`` if that is one integer and none is given; ``kernel_size`` and ``padding`` may differ by dimension.

    Raises
    ------
    ValueError
        If the window cannot be.
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | None = None,
        dimension: int = 3,
        *,
        padding: int | Sequence[int] = 0,
    ) -> None:
        super().__init__()
        if stride is None:
            if not isinstance(kernel_size, int):
                raise ValueError(f"kernel_size={kernel_size}: a window with different extents needs a stride")
            stride = kernel_size
        check_window(dimension, stride=stride)
        self.kernel_size, self.padding = extents(kernel_size, dimension), extents(padding, dimension, "padding", 0)
        self.stride, self.dimension = stride, dimension
        self.offsets = box_offsets(self.kernel_size, self.padding)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """The pooled features of ``x``."""
        check_input(x, self.dimension)
        manager = x.coordinate_manager
        sites = manager.coarser(x.sites, self.stride)
        features, pairs = manager.needed(x.features, x.sites, sites, self.offsets, 1)
        return SparseTensor.on(sites, manager, manager.result(self.pool(features, pairs), sites))

    def pool(self, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        """The pooled features (N_out, C) over a kernel map."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What the module's text shows."""
        return f"{self.kernel_size}, stride={self.stride}, dimension={self.dimension}, padding={self.padding}"


class SparseMaxPool(_WindowPool):
    """The largest feature of the active sites in each window; 0 where there are none.

    Equal to torch's max pooling of the densified input where that has no negative features, or has -inf at inactive
    sites. The gradient goes to the first of equal ones.
    """

    def pool(self, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        """The pooled features (N_out, C) over a kernel map."""
        return sparse_max_pool(features, pairs)


class SparseAvgPool(_WindowPool):
    """The mean of the active sites in each window, by their number and not by the window's; 0 where there are none."""

    def pool(self, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        """The pooled features (N_out, C) over a kernel map."""
        return sparse_average_pool(features, pairs)


class SparseSumPool(_WindowPool):
    """The sum of the active sites in each window: torch's average pooling with ``divisor_override=1``."""

    def pool(self, features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        """The pooled features (N_out, C) over a kernel map."""
        return sparse_sum_pool(features, pairs)


_MODES = ("avg", "max", "sum")


class SparseGlobalPool(nn.Module):
    """The mean, maximum or sum (``mode`` avg, max or sum) over all sites of each sample, (B, C).

    A sample without sites gives zeros. The result is a plain tensor or, of sites over ranks, a DistTensor that every
    rank has whole.

    Raises
    ------
    ValueError
        If there is no such mode.
    """

    def __init__(self, mode: str = "avg") -> None:
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: choose one of {', '.join(_MODES)}")
        self.mode = mode

    def forward(self, x: SparseTensor) -> torch.Tensor:
        """The pooled features of each sample, (B, C)."""
        check_input(x)
        manager, samples = x.coordinate_manager, x.sites.coords[:, 0]
        features, sites = manager.local(x.features), manager.population(x.sites)[:, None]
        if self.mode == "max":
            here = torch.bincount(samples, minlength=x.batch_size)[:, None]
            largest = global_max(features, samples, x.batch_size).masked_fill(here == 0, -math.inf)
            return manager.largest(largest).masked_fill(sites == 0, 0)
        total = manager.summed(global_sum(features, samples, x.batch_size))
        return total / sites.clamp(min=1).to(total.dtype) if self.mode == "avg" else total

    def extra_repr(self) -> str:
        """What the module's text shows."""
        return f"mode={self.mode!r}"
