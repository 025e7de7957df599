"""Dense reference of the sparse layers: torch's dense operators on volumes, with masks of the active sites.

It shares nothing with the sparse layers except their settings and weights, so a mistake of theirs is not repeated here.
A dense layer computes inactive cells, too. They are set to zero after each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.sparse import (
    SparseAvgPool,
    SparseConv,
    SparseGlobalPool,
    SparseInstanceNorm,
    SparseMaxPool,
    SparseSumPool,
)

_CONVOLUTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., torch.Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@dataclass(frozen=True)
class _Sites:
    """A volume (B, C, ...) with zeros where its mask (B, ...) of active sites is False."""

    values: torch.Tensor
    active: torch.Tensor

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(self.active.shape[1:])


def _masked(values: torch.Tensor, active: torch.Tensor) -> _Sites:
    return _Sites(values.where(active[:, None], values.new_zeros(())), active)


@dataclass(frozen=True)
class Frame:
    """Range of a layer's outputs: the first cell and the number of cells of each dimension."""

    first: tuple[int, ...]
    cells: tuple[int, ...]


def _offset_range(offsets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest offset of each dimension."""
    along = list(zip(*offsets, strict=True))
    return list(map(min, along)), list(map(max, along))


def frame_of(layer: Any, extents: Sequence[int]) -> Frame:
    """Return the range of all outputs of ``layer`` for inputs in a volume of these sizes that begins at 0.

    Parameters
    ----------
    layer : Any
    extents : sequence of int
        Size of the volume.

    Returns
    -------
    Frame
    """
    low, high = _offset_range(layer.offsets)
    along = list(zip(extents, layer.stride, low, high, strict=True))
    # Output u reads the inputs stride * u + offset. A transposed layer writes there instead.
    if getattr(layer, "transposed", False):
        return Frame(tuple(low), tuple((n - 1) * s + h - v + 1 for n, s, v, h in along))
    if _reaches_all(layer):
        first = [-(h // s) for _, s, _, h in along]
        return Frame(
            tuple(first), tuple((n - 1 - v) // s + 1 - u for (n, s, v, _), u in zip(along, first, strict=True))
        )
    return Frame((0,) * len(extents), tuple(-(-n // s) for n, s, *_ in along))


def _reaches_all(layer: Any) -> bool:
    """Return True if a layer that is not transposed has outputs wherever its window holds an active site."""
    widens = isinstance(layer, SparseConv) and set(layer.stride) == {1} and not layer.submanifold
    return layer.all_windows or widens


def _pad_input(x: torch.Tensor, layer: Any, frame: Frame, value: float = 0.0) -> torch.Tensor:
    """Return the cells (B, C, ...) that the windows of the outputs in ``frame`` cover, with padding."""
    low, high = _offset_range(layer.offsets)
    pads, inside = list[int](), [slice(None), slice(None)]
    for n, first, cells, s, v, h in zip(x.shape[2:], frame.first, frame.cells, layer.stride, low, high, strict=True):
        begin, end = s * first + v, s * (first + cells - 1) + h + 1
        before = max(0, -begin)
        pads = [before, max(0, end - n), *pads]
        inside.append(slice(begin + before, end + before))
    return F.pad(x, pads, value=value)[tuple(inside)]


def _dense_kernel(layer: SparseConv, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of a kernel without holes around all offsets."""
    low, high = _offset_range(layer.offsets)
    extents = [h - v + 1 for v, h in zip(low, high, strict=True)]
    box = weight.new_zeros(*extents, *weight.shape[:2])
    positions = torch.tensor(layer.offsets) - torch.tensor(low)
    return box.index_put(tuple(positions.unbind(1)), weight.flatten(2).movedim(2, 0)).movedim((-2, -1), (0, 1))


def _dense_convolution(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], groups: int = 1) -> torch.Tensor:
    if x.ndim < 6:
        return _CONVOLUTIONS[x.ndim - 2](x, weight, stride=stride, groups=groups)
    # torch has no convolution of four dimensions: one of three for each position of the kernel along the first, summed.
    starts = range(0, x.shape[2] - weight.shape[2] + 1, stride[0])
    terms = [
        torch.stack([F.conv3d(x[:, :, t + k], weight[:, :, k], stride=stride[1:], groups=groups) for t in starts], 2)
        for k in range(weight.shape[2])
    ]
    return torch.stack(terms).sum(0)


def _coarse_sites(active: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return the mask of the cells of ``stride`` sites along each dimension that have an active site."""
    ends = [(0, -n % s) for n, s in zip(active.shape[1:], stride, strict=True)]
    padded = F.pad(active, list(itertools.chain(*ends[::-1])))
    # Each dimension becomes two, the cells and the sites of a cell. The latter are reduced.
    sizes = [size for n, s in zip(padded.shape[1:], stride, strict=True) for size in (n // s, s)]
    return padded.reshape(len(padded), *sizes).any(dim=tuple(range(2, 2 * active.ndim - 1, 2)))


def _apply_convolution(layer: SparseConv, x: _Sites) -> _Sites:
    weight, stride, groups = _dense_kernel(layer, layer.weight), layer.stride, layer.groups
    # A convolution of the mask with a kernel of ones counts the active inputs of each output. The counts are
    # floating-point numbers, hence the comparisons with 0.5.
    frame, pattern = frame_of(layer, x.extents), _dense_kernel(layer, torch.ones_like(layer.weight[:1, :1]))
    sites = x.active[:, None].to(x.values.dtype)
    if layer.transposed:
        transposed = _TRANSPOSED[layer.dimension]
        y = transposed(x.values, weight, layer.bias, stride=stride, groups=groups)
        return _masked(y, transposed(sites, pattern, stride=stride)[:, 0] > 0.5)
    y = _dense_convolution(_pad_input(x.values, layer, frame), weight, stride, groups)
    y = y if layer.bias is None else y + layer.bias.view(-1, *[1] * layer.dimension)
    if _reaches_all(layer):
        return _masked(y, _dense_convolution(_pad_input(sites, layer, frame), pattern, stride)[:, 0] > 0.5)
    return _masked(y, _coarse_sites(x.active, stride))


def _apply_pool(layer: Any, x: _Sites) -> _Sites:
    frame = frame_of(layer, x.extents)
    sites = x.active[:, None]
    counts = _gather_windows(_pad_input(sites.to(x.values.dtype), layer, frame), layer, frame).sum(0)
    outputs = counts[:, 0] > 0.5 if layer.all_windows else _coarse_sites(x.active, layer.stride)
    if isinstance(layer, SparseMaxPool):
        # Inactive sites do not take part in the maximum, not even as zeros.
        padded = _pad_input(x.values.masked_fill(~sites, -torch.inf), layer, frame, -torch.inf)
        y = _gather_windows(padded, layer, frame).amax(0)
        return _masked(y.where(y.isfinite(), y.new_zeros(())), outputs)
    y = _gather_windows(_pad_input(x.values, layer, frame), layer, frame).sum(0)
    if isinstance(layer, SparseAvgPool):
        # The mean is over active sites. A window without any has the sum 0, so any divisor but 0 is right.
        y = y / counts.clamp(min=1)
    return _masked(y, outputs)


def _gather_windows(padded: torch.Tensor, layer: Any, frame: Frame) -> torch.Tensor:
    """Return all windows' cells (K, B, C, ...), by their position in the window."""
    low, _ = _offset_range(layer.offsets)
    windows = []
    for offset in layer.offsets:
        steps = [
            slice(o - v, o - v + s * (n - 1) + 1, s)
            for o, v, n, s in zip(offset, low, frame.cells, layer.stride, strict=True)
        ]
        windows.append(padded[(slice(None), slice(None), *steps)])
    return torch.stack(windows)


def _apply_layer(layer: nn.Module, x: _Sites) -> _Sites:
    if isinstance(layer, SparseConv):
        return _apply_convolution(layer, x)
    if isinstance(layer, (SparseMaxPool, SparseAvgPool, SparseSumPool)):
        return _apply_pool(layer, x)
    if isinstance(layer, SparseInstanceNorm):
        return _apply_instance_norm(layer, x)
    on_volume = getattr(layer, "on_volume", None)
    if on_volume is not None:
        return _masked(on_volume(x.values), x.active)
    # Batch norm and pointwise layers take the features (sites, C) of the active sites, as in a sparse network.
    rows = layer(x.values.movedim(1, -1)[x.active])
    positions = x.active.nonzero(as_tuple=True)
    volume = rows.new_zeros(*x.active.shape, rows.shape[1]).index_put(positions, rows)
    return _Sites(volume.movedim(-1, 1), x.active)


def _apply_instance_norm(layer: SparseInstanceNorm, x: _Sites) -> _Sites:
    active, space = x.active[:, None].to(x.values.dtype), tuple(range(2, x.values.ndim))
    sites = active.sum(space, keepdim=True).clamp(min=1)
    centred = (x.values - x.values.sum(space, keepdim=True) / sites) * active
    y = centred / (centred.square().sum(space, keepdim=True) / sites + layer.eps).sqrt()
    if layer.weight is not None and layer.bias is not None:
        by_channel = (-1, *[1] * len(space))
        y = y * layer.weight.view(by_channel) + layer.bias.view(by_channel)
    return _masked(y, x.active)


def _apply_global_pool(layer: SparseGlobalPool, x: _Sites) -> torch.Tensor:
    sites = x.active.flatten(1)[:, None]
    values = x.values.flatten(2)
    if layer.mode == "max":
        largest = values.masked_fill(~sites, -torch.inf).amax(2)
        return largest.where(largest.isfinite(), largest.new_zeros(()))
    total = values.sum(2)
    return total / sites.sum(2).clamp(min=1) if layer.mode == "avg" else total


def on_volumes(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Return the volume that sparse ``layers`` compute from the active sites of ``x``, or a global pooling's result.

    A site is active where any channel is not zero. Inactive outputs are zeros.

    Parameters
    ----------
    layers : torch.nn.Sequential
    x : torch.Tensor
        Volume (N, C, ...).

    Returns
    -------
    torch.Tensor
    """
    dense = _masked(x, (x.detach() != 0).any(1))
    for layer in layers:
        if isinstance(layer, SparseGlobalPool):
            return _apply_global_pool(layer, dense)
        dense = _apply_layer(layer, dense)
    return dense.values
