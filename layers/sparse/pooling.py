"""Pooling over windows, and over all sites of a sample.

Only active sites are pooled. The coordinate manager gathers the features of other ranks.
"""

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
from .windows import check_dimension, check_input, sizes_per_dim


class _WindowPool(nn.Module):
    """Pooling of the active sites in windows, which begin at cell stride u - padding for the output site u.

    With stride 1 the output sites u are those of the input. With a larger stride they are the coarse cells that hold
    sites.

    Parameters
    ----------
    kernel_size : int or sequence of int
        Size of a window, in cells.
    stride : int or sequence of int, optional
        Default: ``kernel_size``.
    dimension : int
        Number of spatial dimensions.
    padding : int or sequence of int
    dilation : int or sequence of int
        Distance of the cells of a window.
    all_windows : bool
        True for an output at every site whose window holds an input, as in spconv and in ``SparseConv``. Otherwise
        see above.

    Raises
    ------
    ValueError
        If the window is not valid.
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        dimension: int = 3,
        *,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        all_windows: bool = False,
    ) -> None:
        super().__init__()
        check_dimension(dimension)
        self.kernel_size = sizes_per_dim(kernel_size, dimension)
        self.stride = self.kernel_size if stride is None else sizes_per_dim(stride, dimension, "stride")
        self.padding = sizes_per_dim(padding, dimension, "padding", 0)
        self.dilation = sizes_per_dim(dilation, dimension, "dilation")
        self.dimension, self.all_windows = dimension, all_windows
        self.offsets = box_offsets(self.kernel_size, self.padding, self.dilation)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the pooled features of ``x`` on the output sites."""
        check_input(x, self.dimension)
        manager = x.coordinate_manager
        if self.all_windows:
            sites = manager.reached_sites(x.sites, self.stride, self.offsets)
        else:
            sites = manager.coarser_sites(x.sites, self.stride)
        features, pairs = manager.gather_needed(x.features, x.sites, sites, self.offsets)
        return SparseTensor.on(sites, manager, manager.wrap_features(self.pool(features, pairs), sites))

    @staticmethod
    def pool(features: torch.Tensor, pairs: KernelMap) -> torch.Tensor:
        """Return the features (N_out, C) of the output sites from those of this rank's sites and of the halo (N, C)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the options that the module's representation shows."""
        given = f"stride={self.stride}, dimension={self.dimension}, padding={self.padding}, dilation={self.dilation}"
        return f"{self.kernel_size}, {given}" + (", all_windows" if self.all_windows else "")


class SparseMaxPool(_WindowPool):
    """Maximum of the active sites in each window; 0 if there are none.

    Equals torch's max pooling of the dense input if that has no negative features, or has -inf at inactive sites. The
    gradient goes to the first of equal elements.
    """

    pool = staticmethod(sparse_max_pool)


class SparseAvgPool(_WindowPool):
    """Mean of the active sites in each window; 0 if there are none.

    The divisor is the number of active sites, not the size of the window.
    """

    pool = staticmethod(sparse_average_pool)


class SparseSumPool(_WindowPool):
    """Sum of the active sites in each window, as torch's average pooling with ``divisor_override=1``."""

    pool = staticmethod(sparse_sum_pool)


_MODES = ("avg", "max", "sum")


class SparseGlobalPool(nn.Module):
    """Mean, maximum or sum over all sites of each sample.

    The result (B, C) is a plain tensor. For sites that are split over ranks it is a replicated DistTensor. A sample
    without sites gives zeros.

    Parameters
    ----------
    mode : {"avg", "max", "sum"}

    Raises
    ------
    ValueError
        If the mode is unknown.
    """

    def __init__(self, mode: str = "avg") -> None:
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: choose one of {', '.join(_MODES)}")
        self.mode = mode

    def forward(self, x: SparseTensor) -> torch.Tensor:
        """Return the pooled features of each sample, (B, C)."""
        check_input(x)
        manager, samples = x.coordinate_manager, x.sites.coords[:, 0]
        features, sites = manager.local_rows(x.features), manager.sites_per_sample(x.sites)[:, None]
        if self.mode == "max":
            # 1. Minus infinity on ranks without sites of a sample: zero would win over negative maxima of other ranks.
            # 2. Zero where no rank has sites.
            local_sites = torch.bincount(samples, minlength=x.batch_size)[:, None]
            largest = global_max(features, samples, x.batch_size).masked_fill(local_sites == 0, -math.inf)
            return manager.max_over_ranks(largest).masked_fill(sites == 0, 0)
        total = manager.sum_over_ranks(global_sum(features, samples, x.batch_size))
        return total / sites.clamp(min=1).to(total.dtype) if self.mode == "avg" else total

    def extra_repr(self) -> str:
        """Return the options that the module's representation shows."""
        return f"mode={self.mode!r}"
