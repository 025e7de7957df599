"""Sparse convolution, pooling and normalization against dense torch at the active sites, over boxes of sites.

In one process a case computes with volumes and torch's own operators, and keeps the sites that the sparse layer has;
over ranks it scatters the sites to boxes that are the blocks of a dense tensor, and gathers what comes out. So both
worlds have nothing in common but the weights.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.distribution import block_range
from distconv.jobs.verification.conformance.case import Case, Sizes, fixed, plain
from distconv.layers.sparse import (
    Partition,
    SparseAvgPool,
    SparseConv,
    SparseGlobalPool,
    SparseMaxPool,
    SparseSumPool,
    SparseTensor,
    from_dense,
    gather,
    scatter,
    to_dense,
)
from distconv.layers.sparse.partition import COLUMNS
from distconv.tensor import DistTensor

_BLOCKS = {1: "N W", 2: "N H W", 3: "N D H W", 4: "N 3 D H W"}
"""Of the dense tensor whose blocks are the boxes; it has no part in the numbers."""

_SIZES: dict[int, Sizes] = {1: {}, 2: {}, 3: {"d": 4, "h": 5, "w": 6}, 4: {"d": 3, "h": 4, "w": 5}}

_KINDS = (
    *("samples", "depth", "height", "width", "samples + space", "two in space"),
    *("uneven", "empty samples", "empty space"),
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


# -- dense ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """Where the outputs of a layer lie: the first cell and the number of cells of each dimension."""

    first: tuple[int, ...]
    cells: tuple[int, ...]


def _reach(offsets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    along = list(zip(*offsets, strict=True))
    return list(map(min, along)), list(map(max, along))


def _frame(layer: Any, extents: Sequence[int]) -> _Frame:
    low, high = _reach(layer.offsets)
    if getattr(layer, "transposed", False):
        cells = [
            (n - 1) * layer.stride + layer.dilation * (h - v) + 1 for n, v, h in zip(extents, low, high, strict=True)
        ]
        return _Frame(tuple(layer.dilation * v for v in low), tuple(cells))
    if isinstance(layer, SparseConv) and layer.stride == 1 and not layer.submanifold:
        wider = [n + layer.dilation * (h - v) for n, v, h in zip(extents, low, high, strict=True)]
        return _Frame(tuple(-layer.dilation * h for h in high), tuple(wider))
    return _Frame((0,) * len(extents), tuple(-(-n // layer.stride) for n in extents))


def _padded(x: torch.Tensor, layer: Any, frame: _Frame, value: float = 0.0) -> torch.Tensor:
    """The cells (B, C, ...) that a layer's windows cover, of ``frame`` and no others."""
    (low, high), dilation = _reach(layer.offsets), getattr(layer, "dilation", 1)
    ends = []
    for n, first, cells, v, h in zip(x.shape[2:], frame.first, frame.cells, low, high, strict=True):
        last = layer.stride * (first + cells - 1) + dilation * h
        ends.append((-(layer.stride * first + dilation * v), last - (n - 1)))
    return F.pad(x, list(itertools.chain(*ends[::-1])), value=value)


def _box(layer: SparseConv, weight: torch.Tensor) -> torch.Tensor:
    """Weights of a kernel without holes around all offsets."""
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
    return torch.stack(
        [
            sum(
                F.conv3d(x[:, :, t + r], weight[:, :, k], stride=stride, dilation=dilation) for k, r in enumerate(reach)
            )
            for t in starts
        ],
        2,
    )


def _coarse(active: torch.Tensor, stride: int) -> torch.Tensor:
    """Cells that hold an active site."""
    ends = [(0, -n % stride) for n in active.shape[1:]]
    whole = F.pad(active, list(itertools.chain(*ends[::-1])))
    parts = [part for n in whole.shape[1:] for part in (n // stride, stride)]
    return whole.reshape(len(whole), *parts).any(dim=tuple(range(2, 2 * active.ndim - 1, 2)))


def _convolved(layer: SparseConv, x: _Sites) -> _Sites:
    weight, stride, dilation = _box(layer, layer.weight), layer.stride, layer.dilation
    frame, pattern = _frame(layer, x.extents), _box(layer, torch.ones_like(layer.weight[:1, :1]))
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
    frame = _frame(layer, x.extents)
    sites = x.active[:, None]
    if isinstance(layer, SparseMaxPool):
        padded = _padded(x.values.masked_fill(~sites, -torch.inf), layer, frame, -torch.inf)
        y = _windows(padded, layer, frame).amax(0)
        return _masked(y.where(y.isfinite(), y.new_zeros(())), _coarse(x.active, layer.stride))
    y = _windows(_padded(x.values, layer, frame), layer, frame).sum(0)
    if isinstance(layer, SparseAvgPool):
        y = y / _windows(_padded(sites.to(y.dtype), layer, frame), layer, frame).sum(0).clamp(min=1)
    return _masked(y, _coarse(x.active, layer.stride))


def _windows(padded: torch.Tensor, layer: Any, frame: _Frame) -> torch.Tensor:
    """All windows' cells (K, B, C, ...), by their place in the window."""
    low, _ = _reach(layer.offsets)
    found = []
    for offset in layer.offsets:
        steps = [
            slice(o - v, o - v + layer.stride * (n - 1) + 1, layer.stride)
            for o, v, n in zip(offset, low, frame.cells, strict=True)
        ]
        found.append(padded[(slice(None), slice(None), *steps)])
    return torch.stack(found)


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
        found = values.masked_fill(~sites, -torch.inf).amax(2)
        return found.where(found.isfinite(), found.new_zeros(()))
    total = values.sum(2)
    return total / sites.sum(2).clamp(min=1) if layer.mode == "avg" else total


# -- sparse over ranks ------------------------------------------------------------------------------------------------


def _boxes(blocks: DistTensor, stride: int) -> Partition:
    """The boxes that hold the sites of the tensor's blocks."""
    axes, extents = COLUMNS[blocks.ndim - 1], blocks.shape
    cuts = []
    for column, (axis, extent) in enumerate(zip(axes, extents, strict=True)):
        parts = 1 if axis is None else blocks.grid.shape[axis]
        ends = blocks.dist.boundaries.get(axis) or [block_range(extent, parts, i).start for i in range(parts)]
        cuts.append(tuple((stride if column else 1) * end for end in ends[1:parts]))
    return Partition(blocks.grid, tuple(cuts))


def _both(module: nn.Sequential, x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The volume that the layers of ``module`` make of the active sites of ``x``, or what a global pooling does."""
    active = (x.detach() != 0).any(1)
    frames, dense = [], _masked(x, active)
    for layer in module:
        if isinstance(layer, SparseGlobalPool):
            frames.clear()
            continue
        if hasattr(layer, "offsets"):
            frames.append(_frame(layer, dense.extents if not frames else frames[-1].cells))
    first = module[0]
    stride = first.stride if isinstance(first, SparseConv) and first.transposed else 1
    if isinstance(blocks, DistTensor):
        y = module(scatter(from_dense(x, active=active, stride=stride), blocks.grid, _boxes(blocks, stride)))
        if not isinstance(y, SparseTensor):
            return y  # type: ignore[no-any-return]
        return to_dense(gather(y), frames[-1].cells, origin=[y.stride * cell for cell in frames[-1].first])
    for layer in module:
        if isinstance(layer, SparseGlobalPool):
            return _dense_global(layer, dense)
        dense = _dense(layer, dense)
    return dense.values


# -- the table --------------------------------------------------------------------------------------------------------


def _case(dimension: int, operator: str, option: str, build: Callable[[Sizes], Any]) -> Case:
    letters = _BLOCKS[dimension]
    extents = " ".join(letters.lower().split()[1:])
    return Case(
        operator,
        f"{dimension}-D, {option}",
        _both,
        (plain(f"n c {extents}", "sites"), fixed(letters)),
        module=lambda sizes: nn.Sequential(*build(sizes)),
        sizes=_SIZES[dimension],
        kinds=_KINDS,
    )


def _convolutions(dimension: int) -> Iterator[Case]:
    def case(option: str, kernel: Any, **options: Any) -> Case:
        return _case(
            dimension,
            "SparseConv",
            option,
            lambda sizes: [SparseConv(sizes["c"], 3, kernel, dimension=dimension, **options)],
        )

    yield case("submanifold K3", 3)
    yield case("submanifold K2 d2, no bias", 2, dilation=2, bias=False)
    yield case("K3 s2", 3, stride=2)
    yield case("K2 s2", 2, stride=2)
    yield case("K1 s3", 1, stride=3)
    yield case("K3, all sites it reaches", 3, submanifold=False)
    if dimension < 4:
        yield case("transposed K2 s2", 2, stride=2, transposed=True)
        yield case("transposed K3 s2", 3, stride=2, transposed=True, bias=False)


def _random_convolutions(dimension: int, count: int) -> Iterator[Case]:
    """Of random kernels, strides and dilations; every other one of random offsets."""
    rng = random.Random(dimension)
    for number in range(count):
        kernel: Any = [rng.randint(1, 4 if dimension < 3 else 3) for _ in range(dimension)]
        options: dict[str, Any] = {"stride": rng.choice([1, 1, 2, 3]), "dilation": rng.choice([1, 2])}
        options["bias"] = rng.random() < 0.5
        name = "K" + "x".join(map(str, kernel))
        if number % 2:
            near = list(itertools.product(range(-2, 3), repeat=dimension))
            options["offsets"], kernel = rng.sample(near, rng.randint(1, min(6, len(near)))), None
            name = f"{len(options['offsets'])} offsets"
        if options["stride"] == 1:
            options["submanifold"] = rng.random() < 0.5
        kind = {True: " submanifold", False: " all reached", None: ""}[options.get("submanifold")]
        name = f"random {number}: {name} s{options['stride']} d{options['dilation']}{kind}"
        yield _case(
            dimension,
            "SparseConv",
            name,
            lambda sizes, kernel=kernel, options=options: [
                SparseConv(sizes["c"], 3, kernel, dimension=dimension, **options)
            ],
        )


def _others(dimension: int) -> Iterator[Case]:
    for kind in (SparseMaxPool, SparseAvgPool, SparseSumPool):
        yield _case(dimension, kind.__name__, "K2 s2", lambda sizes, kind=kind: [kind(2, dimension=dimension)])
        yield _case(
            dimension,
            kind.__name__,
            "K3 s2 p1",
            lambda sizes, kind=kind: [kind(3, 2, dimension, padding=1)],
        )
    for mode in ("max", "avg", "sum"):
        yield _case(dimension, "SparseGlobalPool", mode, lambda sizes, mode=mode: [SparseGlobalPool(mode)])
    yield _case(
        dimension,
        "sparse layers",
        "convolution, batch norm, ReLU, K2 s2",
        lambda sizes: [
            SparseConv(sizes["c"], 3, 3, dimension=dimension),
            nn.BatchNorm1d(3),
            nn.ReLU(),
            SparseConv(3, 2, 2, 2, dimension),
        ],
    )


CASES: tuple[Case, ...] = tuple(
    case
    for dimension in (1, 2, 3, 4)
    for case in (*_convolutions(dimension), *_random_convolutions(dimension, 8), *_others(dimension))
)
