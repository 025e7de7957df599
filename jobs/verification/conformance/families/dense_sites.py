"""Dense reference of the sparse layers: torch's dense operators on volumes, with masks of the active sites.

It shares nothing with the sparse layers except their settings and weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.sparse import SparseAvgPool, SparseConv, SparseGlobalPool, SparseMaxPool, SparseSumPool

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


def _reach(offsets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
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
    low, high = _reach(layer.offsets)
    if getattr(layer, "transposed", False):
        cells = [
            (n - 1) * layer.stride + layer.dilation * (h - v) + 1 for n, v, h in zip(extents, low, high, strict=True)
        ]
        return Frame(tuple(layer.dilation * v for v in low), tuple(cells))
    if isinstance(layer, SparseConv) and layer.stride == 1 and not layer.submanifold:
        wider = [n + layer.dilation * (h - v) for n, v, h in zip(extents, low, high, strict=True)]
        return Frame(tuple(-layer.dilation * h for h in high), tuple(wider))
    return Frame((0,) * len(extents), tuple(-(-n // layer.stride) for n in extents))


def _padded(x: torch.Tensor, layer: Any, frame: Frame, value: float = 0.0) -> torch.Tensor:
    """Return the cells (B, C, ...) that the windows of the outputs in ``frame`` cover, with padding."""
    (low, high), dilation = _reach(layer.offsets), getattr(layer, "dilation", 1)
    pads, inside = list[int](), [slice(None), slice(None)]
    for n, first, cells, v, h in zip(x.shape[2:], frame.first, frame.cells, low, high, strict=True):
        begin, end = layer.stride * first + dilation * v, layer.stride * (first + cells - 1) + dilation * h + 1
        before = max(0, -begin)
        pads = [before, max(0, end - n), *pads]
        inside.append(slice(begin + before, end + before))
    return F.pad(x, pads, value=value)[tuple(inside)]


def _box(layer: SparseConv, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of a kernel without holes around all offsets."""
    low, high = _reach(layer.offsets)
    extents = [h - v + 1 for v, h in zip(low, high, strict=True)]
    box = weight.new_zeros(*extents, *weight.shape[:2])
    places = torch.tensor(layer.offsets) - torch.tensor(low)
    return box.index_put(tuple(places.unbind(1)), weight.flatten(2).movedim(2, 0)).movedim((-2, -1), (0, 1))


def _dense_convolution(x: torch.Tensor, weight: torch.Tensor, stride: int, dilation: int) -> torch.Tensor:
    if x.ndim < 6:
        return _CONVOLUTIONS[x.ndim - 2](x, weight, stride=stride, dilation=dilation)
    # Of four dimensions: torch's of three for each position of the kernel along the first.
    reach = [k * dilation for k in range(weight.shape[2])]
    starts = range(0, x.shape[2] - reach[-1], stride)
    along = [
        torch.stack([F.conv3d(x[:, :, t + r], weight[:, :, k], stride=stride, dilation=dilation) for t in starts], 2)
        for k, r in enumerate(reach)
    ]
    return torch.stack(along).sum(0)


def _coarse(active: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the cells that hold an active site."""
    ends = [(0, -n % stride) for n in active.shape[1:]]
    whole = F.pad(active, list(itertools.chain(*ends[::-1])))
    parts = [part for n in whole.shape[1:] for part in (n // stride, stride)]
    return whole.reshape(len(whole), *parts).any(dim=tuple(range(2, 2 * active.ndim - 1, 2)))


def _convolved(layer: SparseConv, x: _Sites) -> _Sites:
    weight, stride, dilation = _box(layer, layer.weight), layer.stride, layer.dilation
    frame, pattern = frame_of(layer, x.extents), _box(layer, torch.ones_like(layer.weight[:1, :1]))
    sites = x.active[:, None].to(x.values.dtype)
    if layer.transposed:
        transposed = _TRANSPOSED[layer.dimension]
        y = transposed(x.values, weight, layer.bias, stride=stride, dilation=dilation)
        return _masked(y, transposed(sites, pattern, stride=stride, dilation=dilation)[:, 0] > 0.5)
    y = _dense_convolution(_padded(x.values, layer, frame), weight, stride, dilation)
    y = y if layer.bias is None else y + layer.bias.view(-1, *[1] * layer.dimension)
    if layer.submanifold or stride > 1:
        return _masked(y, _coarse(x.active, stride))
    return _masked(y, _dense_convolution(_padded(sites, layer, frame), pattern, 1, dilation)[:, 0] > 0.5)


def _pooled(layer: Any, x: _Sites) -> _Sites:
    frame = frame_of(layer, x.extents)
    sites = x.active[:, None]
    if isinstance(layer, SparseMaxPool):
        padded = _padded(x.values.masked_fill(~sites, -torch.inf), layer, frame, -torch.inf)
        y = _windows(padded, layer, frame).amax(0)
        return _masked(y.where(y.isfinite(), y.new_zeros(())), _coarse(x.active, layer.stride))
    y = _windows(_padded(x.values, layer, frame), layer, frame).sum(0)
    if isinstance(layer, SparseAvgPool):
        y = y / _windows(_padded(sites.to(y.dtype), layer, frame), layer, frame).sum(0).clamp(min=1)
    return _masked(y, _coarse(x.active, layer.stride))


def _windows(padded: torch.Tensor, layer: Any, frame: Frame) -> torch.Tensor:
    """Return all windows' cells (K, B, C, ...), by their position in the window."""
    low, _ = _reach(layer.offsets)
    windows = []
    for offset in layer.offsets:
        steps = [
            slice(o - v, o - v + layer.stride * (n - 1) + 1, layer.stride)
            for o, v, n in zip(offset, low, frame.cells, strict=True)
        ]
        windows.append(padded[(slice(None), slice(None), *steps)])
    return torch.stack(windows)


def _dense(layer: nn.Module, x: _Sites) -> _Sites:
    if isinstance(layer, SparseConv):
        return _convolved(layer, x)
    if isinstance(layer, (SparseMaxPool, SparseAvgPool, SparseSumPool)):
        return _pooled(layer, x)
    rows = layer(x.values.movedim(1, -1)[x.active])
    places = x.active.nonzero(as_tuple=True)
    volume = rows.new_zeros(*x.active.shape, rows.shape[1]).index_put(places, rows)
    return _Sites(volume.movedim(-1, 1), x.active)


def _dense_global(layer: SparseGlobalPool, x: _Sites) -> torch.Tensor:
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
            return _dense_global(layer, dense)
        dense = _dense(layer, dense)
    return dense.values
