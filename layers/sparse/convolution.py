"""Convolution: strided, transposed and on submanifolds, with kernels of any shape.

The layer determines its output sites, obtains a kernel map and gathered features from the coordinate manager, and calls
:func:`distconv.kernels.sparse.sparse_convolution`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from distconv.errors import ShapeError
from distconv.kernels.sparse import box_offsets, sparse_convolution

from .coordinate_manager import CoordinateManager, Sites
from .tensor import SparseTensor
from .windows import check_input, check_window, sizes_per_dim, to_offsets


class SparseConv(nn.Module):
    """Convolution of a SparseTensor: at its output sites the result of torch's convolution of the dense input.

    With kernel size k, padding p = dilation x ((k - 1) // 2) in each dimension and W the weight, ``out[u] = bias + sum
    over i of W[:, :, i] x[stride u + dilation i - p]``; inactive sites of x count as zeros. Space has no borders: for
    an even kernel torch needs (k - 1) // 2 zeros before and k // 2 after, times the dilation.

    Output sites are

    - ``submanifold`` (the default with stride 1): those of the input;
    - stride 1 without ``submanifold``: all sites that any input reaches, also beyond the range of the input;
    - stride s > 1: the cells of s^D that hold an input, u = floor(site / s), even if no input lies in the window;
    - ``transposed`` (torch's ``conv_transpose`` with the same p): the finer sites from which a stride has derived the
      sites of the input; if there are none, all sites that any input reaches.

    The weight has torch's shape, ``(F, C, *kernel)``, transposed ``(C, F, *kernel)``, with ``offsets`` (F, C, K). So
    state dictionaries fit ``nn.Conv1d`` to ``nn.Conv3d`` and their transposed versions. In memory the offsets come
    first. Under autocast the result has the low dtype.

    Source: Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", eq. 3.

    Parameters
    ----------
    in_channels, out_channels : int
        C and F.
    kernel_size : int, sequence of int or None
        None if ``offsets`` are given.
    stride : int
    dimension : int
        Number of spatial dimensions D, 1 to 4.
    submanifold : bool, optional
        True to keep the sites of the input (default: True with stride 1).
    transposed : bool
        True for a transposed convolution. Otherwise an ordinary one.
    offsets : sequence of sequence of int, optional
        K offsets of D integers each instead of the box of ``kernel_size``, whose offsets are i - (k - 1) // 2.
    dilation : int
    bias : bool

    Raises
    ------
    ValueError
        If the kernel, stride, dilation or offsets are not valid, or a submanifold has a stride.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] | None,
        stride: int = 1,
        dimension: int = 3,
        *,
        submanifold: bool | None = None,
        transposed: bool = False,
        offsets: Sequence[Sequence[int]] | None = None,
        dilation: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_window(dimension, stride=stride, dilation=dilation)
        if submanifold and stride > 1:
            raise ValueError(
                f"SparseConv: a submanifold convolution keeps its sites, so its stride must be 1 (stride={stride})"
            )
        self.in_channels, self.out_channels, self.dimension = in_channels, out_channels, dimension
        self.stride, self.dilation, self.transposed = stride, dilation, transposed
        self.submanifold = stride == 1 if submanifold is None else submanifold
        if offsets is None:
            sizes = sizes_per_dim(kernel_size, dimension)
            self.offsets = box_offsets(sizes, [(k - 1) // 2 for k in sizes])
        else:
            self.offsets = to_offsets(offsets, dimension)
            sizes = (len(offsets),)
        matrix = (in_channels, out_channels)
        # Offsets come first in memory, so that each has a contiguous matrix. The view has torch's order of dimensions.
        stored = torch.empty(*sizes, *matrix)
        channels = (-2, -1) if transposed else (-1, -2)
        self.weight = nn.Parameter(stored.permute(*(d % stored.ndim for d in channels), *range(len(sizes))))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize weights and biases as torch's convolutions do."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(max(1, self.weight[0].numel()))
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def matrices(self) -> torch.Tensor:
        """The weight as (K, C, F), one matrix for each offset; not a copy."""
        return self._matrices(self.weight)

    def _matrices(self, weight: torch.Tensor) -> torch.Tensor:
        by_offset = weight.flatten(2)
        return by_offset.permute(2, 0, 1) if self.transposed else by_offset.permute(2, 1, 0)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the convolution of ``x`` on the output sites.

        Raises
        ------
        ShapeError
            If ``x`` has another number of channels or dimensions.
        """
        check_input(x, self.dimension)
        if x.shape[1] != self.in_channels:
            raise ShapeError(f"SparseConv requires {self.in_channels} channels, but its input has {x.shape[1]}")
        manager = x.coordinate_manager
        sites = self._output_sites(x.sites, manager)
        features, pairs = manager.gather_needed(
            x.features, x.sites, sites, self.offsets, self.dilation, transposed=self.transposed
        )
        weight = self._matrices(manager.replicate_parameter(self.weight))
        bias = None if self.bias is None else manager.replicate_parameter(self.bias)
        y = sparse_convolution(features, weight, pairs, bias)
        return SparseTensor.on(sites, manager, manager.wrap_features(y, sites))

    def _output_sites(self, sites: Sites, manager: CoordinateManager) -> Sites:
        if self.submanifold:
            return sites
        if self.transposed:
            return manager.finer_sites(sites, self.stride, self.offsets, self.dilation)
        if self.stride > 1:
            return manager.coarser_sites(sites, self.stride)
        return manager.wider_sites(sites, tuple(tuple(-o for o in offset) for offset in self.offsets), self.dilation)

    def extra_repr(self) -> str:
        """Return the options that the module's representation shows."""
        kinds = [name for name in ("submanifold", "transposed") if getattr(self, name)]
        return ", ".join(
            [
                f"{self.in_channels}, {self.out_channels}, offsets={len(self.offsets)}, stride={self.stride}",
                f"dimension={self.dimension}, dilation={self.dilation}, bias={self.bias is not None}",
                *kinds,
            ]
        )
