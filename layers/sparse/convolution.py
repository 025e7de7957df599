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
from .windows import check_dimension, check_input, sizes_per_dim, to_offsets


class SparseConv(nn.Module):
    """Convolution of a SparseTensor: at its output sites the result of torch's convolution of the dense input.

    With kernel size k, padding p and W the weight, ``out[u] = bias + sum over i of W[:, :, i] x[stride u + dilation i -
    p]``; inactive sites of x count as zeros. The default p = dilation x ((k - 1) // 2) centres the kernel. For an even
    kernel torch then needs (k - 1) // 2 zeros before and k // 2 after, times the dilation.

    Output sites are

    - ``submanifold`` (the default with stride 1): those of the input;
    - ``all_windows``, and stride 1 without ``submanifold``: all sites whose window holds an input, as in spconv. With a
      spatial shape of the input (``SparseTensor.with_spatial_shape``) they are within the output of torch's
      convolution with this padding. Otherwise they are also beyond the range of the input;
    - stride s > 1: the cells of s^D that hold an input, u = floor(site / s), even if no input lies in the window;
    - ``transposed`` (torch's ``conv_transpose`` with the same p): the finer sites from which layers have derived the
      sites of the input. If there are none, or with ``all_windows``, all sites that any input reaches.

    The weight has torch's shape, ``(F, C / groups, *kernel)``, transposed ``(C, F / groups, *kernel)``, with
    ``offsets`` K in place of the kernel. So state dictionaries fit ``nn.Conv1d`` to ``nn.Conv3d`` and their transposed
    versions. In memory the offsets come first. Under autocast the result has the low dtype.

    Source: Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", eq. 3.

    Parameters
    ----------
    in_channels, out_channels : int
        C and F.
    kernel_size : int, sequence of int or None
        None if ``offsets`` are given.
    stride : int or sequence of int
    dimension : int
        Number of spatial dimensions D, 1 to 4.
    submanifold : bool, optional
        True to keep the sites of the input (default: True with stride 1 and without ``all_windows``).
    transposed : bool
        True for a transposed convolution. Otherwise an ordinary one.
    offsets : sequence of sequence of int, optional
        K offsets of D integers each, in steps of ``dilation``, instead of a box.
    dilation : int or sequence of int
    padding : int or sequence of int, optional
        p of a box (default: the kernel is centred).
    groups : int
        Number of groups of channels that are convolved separately. ``in_channels`` for a depthwise convolution.
    all_windows : bool
        True for an output at every site whose window holds an input. Otherwise see above.
    bias : bool

    Raises
    ------
    ValueError
        If the kernel, stride, dilation, padding, offsets or groups are not valid, or a submanifold has a stride or
        ``all_windows``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] | None,
        stride: int | Sequence[int] = 1,
        dimension: int = 3,
        *,
        submanifold: bool | None = None,
        transposed: bool = False,
        offsets: Sequence[Sequence[int]] | None = None,
        dilation: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
        groups: int = 1,
        all_windows: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_dimension(dimension)
        self.in_channels, self.out_channels, self.dimension = in_channels, out_channels, dimension
        self.stride = sizes_per_dim(stride, dimension, "stride")
        self.dilation = sizes_per_dim(dilation, dimension, "dilation")
        self.transposed, self.groups, self.all_windows = transposed, groups, all_windows
        keeps_sites = not all_windows and set(self.stride) == {1}
        if submanifold and not keeps_sites:
            raise ValueError(
                "SparseConv: a submanifold convolution keeps its sites, so its stride must be 1 "
                f"(stride={stride}) and all_windows False ({all_windows=})"
            )
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"SparseConv: groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}"
            )
        self.submanifold = keeps_sites if submanifold is None else submanifold
        sizes = self._set_offsets(kernel_size, offsets, padding)
        # Offsets come first in memory, so that each has a contiguous matrix. The view has torch's order of dimensions.
        stored = torch.empty(
            *sizes, in_channels // (1 if transposed else groups), out_channels // (groups if transposed else 1)
        )
        channels = (-2, -1) if transposed else (-1, -2)
        self.weight = nn.Parameter(stored.permute(*(d % stored.ndim for d in channels), *range(len(sizes))))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def _set_offsets(
        self,
        kernel_size: int | Sequence[int] | None,
        offsets: Sequence[Sequence[int]] | None,
        padding: int | Sequence[int] | None,
    ) -> tuple[int, ...]:
        """Set ``offsets``, in cells of the finer sites, and return the sizes of the kernel in the weight."""
        if offsets is not None:
            if padding is not None:
                raise ValueError(f"SparseConv: padding={padding} applies to a box. Add it to the offsets.")
            steps = to_offsets(offsets, self.dimension)
            self.offsets = tuple(tuple(o * d for o, d in zip(each, self.dilation, strict=True)) for each in steps)
            return (len(steps),)
        sizes = sizes_per_dim(kernel_size, self.dimension)
        centre = [d * ((k - 1) // 2) for k, d in zip(sizes, self.dilation, strict=True)]
        before = centre if padding is None else sizes_per_dim(padding, self.dimension, "padding", 0)
        self.offsets = box_offsets(sizes, before, self.dilation)
        return sizes

    def reset_parameters(self) -> None:
        """Initialize weights and biases as torch's convolutions do."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(max(1, self.weight[0].numel()))
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def matrices(self) -> torch.Tensor:
        """The weight as (K, C, F), or with groups (K, G, C / G, F / G), one matrix for each offset; not a copy."""
        return self._matrices(self.weight)

    def _matrices(self, weight: torch.Tensor) -> torch.Tensor:
        by_offset = weight.flatten(2)
        if self.groups > 1:
            by_offset = by_offset.unflatten(0, (self.groups, -1))
        return by_offset.movedim(-1, 0) if self.transposed else by_offset.movedim(-1, 0).transpose(-2, -1)

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
        features, pairs = manager.gather_needed(x.features, x.sites, sites, self.offsets, transposed=self.transposed)
        weight = self._matrices(manager.replicate_parameter(self.weight))
        bias = None if self.bias is None else manager.replicate_parameter(self.bias)
        y = sparse_convolution(features, weight, pairs, bias)
        return SparseTensor.on(sites, manager, manager.wrap_features(y, sites))

    def _output_sites(self, sites: Sites, manager: CoordinateManager) -> Sites:
        if self.submanifold:
            return sites
        source = manager.source_sites(sites, self.stride) if self.transposed and not self.all_windows else None
        if source is not None:
            return source
        if self.transposed or self.all_windows or set(self.stride) == {1}:
            return manager.reached_sites(sites, self.stride, self.offsets, transposed=self.transposed)
        return manager.coarser_sites(sites, self.stride)

    def extra_repr(self) -> str:
        """Return the options that the module's representation shows."""
        kinds = [name for name in ("submanifold", "transposed", "all_windows") if getattr(self, name)]
        return ", ".join(
            [
                f"{self.in_channels}, {self.out_channels}, offsets={len(self.offsets)}, stride={self.stride}",
                f"dimension={self.dimension}, dilation={self.dilation}, groups={self.groups}",
                f"bias={self.bias is not None}",
                *kinds,
            ]
        )
