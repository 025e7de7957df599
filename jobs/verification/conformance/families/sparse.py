"""Sparse convolution, pooling and normalization against dense torch at the active sites, over blocks of sites.

In one process, a case computes volumes with torch's own operators and selects the active sites of the sparse layer.
Over ranks, each rank has the active sites of its block and writes the results into a dense block. The two computations
share nothing except the weights.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from distconv.distribution import Distribution, block_range
from distconv.jobs.verification.conformance.families.dense_sites import Frame, frame_of, on_volumes
from distconv.jobs.verification.conformance.table import ConformanceCase, Input, Sizes
from distconv.layers.sparse import (
    Partition,
    SparseAvgPool,
    SparseConv,
    SparseGlobalPool,
    SparseInstanceNorm,
    SparseMaxPool,
    SparseSumPool,
    SparseTensor,
    broadcast_to_sites,
    prune,
    union,
)
from distconv.layers.sparse.coordinate_manager import Sites
from distconv.layers.sparse.distributed import DistributedManager
from distconv.layers.sparse.partition import COLUMNS
from distconv.tensor import DistTensor

_X = {1: "N c W", 2: "N c H W", 3: "N c D H W", 4: "N c 3 D H W"}

_SIZES: dict[int, Sizes] = {1: {}, 2: {}, 3: {"d": 4, "h": 5, "w": 6}, 4: {"d": 3, "h": 4, "w": 5}}

_KINDS = (
    *("samples", "depth", "height", "width", "samples + space", "two in space"),
    *("uneven", "empty samples", "empty space"),
)

# -- sparse, over blocks ----------------------------------------------------------------------------------------------


def _axes(dimension: int) -> list[tuple[int, str | None]]:
    """Return the dimension of a volume (N, C, ...) and the axis of each column of coordinates."""
    return list(zip((0, *range(2, dimension + 2)), COLUMNS[dimension], strict=True))


def _block_starts(x: DistTensor, dim: int, axis: str | None) -> list[int]:
    """Return the first cell of each block along a dimension, which is not split if ``axis`` is None."""
    if axis is None:
        return [0]
    parts = x.grid.shape[axis]
    edges = x.dist.boundaries.get(axis) or [block_range(x.shape[dim], parts, i).start for i in range(parts)]
    return list(edges[:parts])


def _sparse_block(x: DistTensor, stride: tuple[int, ...]) -> SparseTensor:
    """Return the active sites of the blocks of ``x`` (N, C, ...); cell u is the site stride x u."""
    # The first column of coordinates is the sample, which has no stride.
    axes, steps = _axes(x.ndim - 2), [1, *stride]
    starts = [_block_starts(x, dim, axis) for dim, axis in axes]
    cuts = tuple(tuple(step * cut for cut in inner[1:]) for inner, step in zip(starts, steps, strict=True))
    manager = DistributedManager(x.shape[0], Partition(x.grid, cuts))
    # Local cells first, then global sites: a rank finds the active sites of its own block only.
    cells = (x.local.detach() != 0).any(1).nonzero()
    features = x.local.movedim(1, -1)[cells.unbind(1)]
    first = [inner[x.grid.coords[axis] if axis else 0] for inner, (_, axis) in zip(starts, axes, strict=True)]
    sites = Sites((cells + torch.tensor(first)) * torch.tensor(steps), stride)
    return SparseTensor.on(sites, manager, manager.wrap_features(features, sites))


def _dense_block(y: SparseTensor, frame: Frame) -> DistTensor:
    """Return the blocks of the volume (N, C, ...) of ``frame`` that hold the sites of ``y``."""
    manager = y.coordinate_manager
    assert isinstance(manager, DistributedManager)
    grid, columns = manager.partition.grid, zip(COLUMNS[y.dimension], manager.partition.cuts, strict=True)
    firsts, extents, steps = (0, *frame.first), (y.batch_size, *frame.cells), (1, *y.sites.stride)
    boundaries, begin = dict[str, tuple[int, ...]](), list[int]()
    for (axis, cuts), first, extent, step in zip(columns, firsts, extents, steps, strict=True):
        # A site u belongs to the cell u / step, so a cut between sites becomes the next multiple of step. ``frame`` may
        # begin before or after 0, and end before a cut: then blocks at its ends are empty.
        edges = (0, *(min(extent, max(0, -(-cut // step) - first)) for cut in cuts), extent)
        begin.append(edges[grid.coords[axis]] if axis else 0)
        if axis and cuts:
            boundaries[axis] = edges
    samples, *axes = COLUMNS[y.dimension]
    dist = Distribution(grid, (samples, None, *axes), boundaries=boundaries)
    shape = (extents[0], y.shape[1], *extents[1:])
    positions = y.sites.coords // torch.tensor(steps) - torch.tensor(firsts) - torch.tensor(begin)
    batch, channels, *cells = dist.local_shape(shape)
    rows = manager.local_rows(y.features)
    volume = rows.new_zeros(batch, *cells, channels).index_put(positions.unbind(1), rows)
    return DistTensor(volume.movedim(-1, 1), dist, shape)


def _forward(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Return the volume that ``layers`` compute from the active sites of ``x``, or a global pooling's result."""
    if not isinstance(x, DistTensor):
        return on_volumes(layers, x)
    first, frame = layers[0], Frame((0,) * (x.ndim - 2), tuple(x.shape[2:]))
    # A transposed layer refines its sites: its input must be on a grid that is coarser by its stride.
    stride = first.stride if isinstance(first, SparseConv) and first.transposed else (1,) * (x.ndim - 2)
    y = layers(_sparse_block(x, stride))
    for layer in layers:
        frame = frame_of(layer, frame.cells) if hasattr(layer, "offsets") else frame
    return _dense_block(y, frame) if isinstance(y, SparseTensor) else y


# -- operators on sets of sites, each with its dense reference --------------------------------------------------------


class _PruneAndUnion(nn.Module):
    """Adds the sites whose first channel is positive once more."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        return union(x, prune(x, x.features[:, 0] > 0))

    def on_volume(self, values: torch.Tensor) -> torch.Tensor:
        """Return the volume of the result."""
        return values + values * (values[:, :1] > 0)


class _Broadcast(nn.Module):
    """Multiplies by the sum of each sample, and adds a parameter for each sample."""

    def __init__(self, samples: int, channels: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(samples, channels))

    def forward(self, x: SparseTensor) -> SparseTensor:
        y: SparseTensor = x * broadcast_to_sites(SparseGlobalPool("sum")(x), x) + broadcast_to_sites(self.shift, x)
        return y

    def on_volume(self, values: torch.Tensor) -> torch.Tensor:
        """Return the volume of the result, also at inactive sites."""
        space = tuple(range(2, values.ndim))
        return values * values.sum(space, keepdim=True) + self.shift.view(*self.shift.shape, *[1] * len(space))


# -- the table --------------------------------------------------------------------------------------------------------


def _case(dimension: int, operator: str, option: str, build: Callable[[Sizes], Any]) -> ConformanceCase:
    return ConformanceCase(
        operator,
        f"{dimension}-D, {option}",
        _forward,
        (Input(_X[dimension], "sites"),),
        module=lambda sizes: nn.Sequential(*build(sizes)),
        sizes=_SIZES[dimension],
        kinds=_KINDS,
    )


def _layer(dimension: int, option: str, kind: Callable[..., nn.Module], *given: Any, **options: Any) -> ConformanceCase:
    """Return the case of a layer that is built from its arguments alone."""
    return _case(dimension, kind.__name__, option, lambda sizes: [kind(*given, **options)])


def _convolution(dimension: int, option: str, kernel: Any, **options: Any) -> ConformanceCase:
    options["dimension"] = dimension
    return _case(dimension, "SparseConv", option, lambda sizes: [SparseConv(sizes["c"], 3, kernel, **options)])


def _depthwise(dimension: int, kernel: int, stride: int, sizes: Sizes) -> list[nn.Module]:
    channels = sizes["c"]
    return [SparseConv(channels, channels, kernel, stride, dimension, groups=channels)]


def _convolutions(dimension: int) -> Iterator[ConformanceCase]:
    yield _convolution(dimension, "submanifold K3", 3)
    yield _convolution(dimension, "submanifold K2 d2, no bias", 2, dilation=2, bias=False)
    yield _convolution(dimension, "K3 s2", 3, stride=2)
    yield _convolution(dimension, "K2 s2", 2, stride=2)
    yield _convolution(dimension, "K1 s3", 1, stride=3)
    yield _convolution(dimension, "K3, all sites it reaches", 3, submanifold=False)
    yield _convolution(dimension, "all windows K3 s2 p1", 3, stride=2, padding=1, all_windows=True)
    yield _convolution(dimension, "all windows K2 s3 d2 p0", 2, stride=3, dilation=2, padding=0, all_windows=True)
    kernel, stride, dilation = (each[:dimension] for each in ((3, 2, 1, 2), (2, 3, 1, 2), (2, 1, 3, 1)))
    yield _convolution(dimension, "sizes by dimension", kernel, stride=stride, dilation=dilation)
    by_dimension = {"stride": stride, "padding": (2, 0, 1, 1)[:dimension]}
    yield _convolution(
        dimension, "all windows by dimension", kernel, dilation=dilation, all_windows=True, **by_dimension
    )
    for kernel_size, step in ((3, 1), (2, 2)):
        layer = partial(_depthwise, dimension, kernel_size, step)
        yield _case(dimension, "SparseConv", f"depthwise K{kernel_size} s{step}", layer)
    if dimension < 4:
        yield _convolution(dimension, "transposed K2 s2", 2, stride=2, transposed=True)
        yield _convolution(dimension, "transposed K3 s2", 3, stride=2, transposed=True, bias=False)
        yield _convolution(dimension, "transposed by dimension", kernel, transposed=True, **by_dimension)


def _random_convolutions(dimension: int, count: int) -> Iterator[ConformanceCase]:
    """Yield convolutions with random kernels, strides and dilations; every second one has random offsets."""
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
        yield _convolution(dimension, name, kernel, **options)


def _pools_and_networks(dimension: int) -> Iterator[ConformanceCase]:
    for kind in (SparseMaxPool, SparseAvgPool, SparseSumPool):
        yield _layer(dimension, "K2 s2", kind, 2, 2, dimension)
        yield _layer(dimension, "K3 s2 p1", kind, 3, 2, dimension, padding=1)
        yield _layer(dimension, "all windows K3 s2 p1", kind, 3, 2, dimension, padding=1, all_windows=True)
        sizes, strides, dilation = (each[:dimension] for each in ((2, 3, 1, 2), (2, 1, 3, 2), (2, 1, 1, 1)))
        yield _layer(dimension, "sizes by dimension", kind, sizes, strides, dimension, dilation=dilation)
    yield _case(dimension, "SparseInstanceNorm", "affine", lambda sizes: [SparseInstanceNorm(sizes["c"])])
    yield _case(dimension, "union", "with prune", lambda sizes: [_PruneAndUnion()])
    yield _case(dimension, "broadcast_to_sites", "sum", lambda sizes: [_Broadcast(sizes["n"], sizes["c"])])
    for mode in ("max", "avg", "sum"):
        yield _layer(dimension, mode, SparseGlobalPool, mode)
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


CASES: tuple[ConformanceCase, ...] = tuple(
    case
    for dimension in (1, 2, 3, 4)
    for case in (*_convolutions(dimension), *_random_convolutions(dimension, 8), *_pools_and_networks(dimension))
)
