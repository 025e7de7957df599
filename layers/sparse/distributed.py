"""Sparse tensors over ranks: each has the sites of a box of samples and space, and layers exchange halos of sites.

The rows of their features are a DistTensor, whose blocks are as long as ranks have sites: batch norm, linear layers,
losses and gradients of parameters are those of any DistTensor. Layers over windows ask the manager for what they need.

::

    x = scatter(SparseTensor(coords, features), grid)   # boxes with about as many sites each
    loss = F.cross_entropy(model(x), labels)            # any model of sparse layers and ordinary modules on features
    loss.backward()
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.communication.transport import allreduce
from distconv.distribution import Distribution, block_range
from distconv.errors import CoordinateError, DistributionError, ShapeError
from distconv.grid import ProcessGrid
from distconv.kernels.sparse import KernelMap, kernel_map, sorting_order
from distconv.kernels.sparse.coordinates import Offsets
from distconv.layers.plumbing.alignment import whole_over
from distconv.placement import scatter as scatter_dense
from distconv.tensor import DistTensor, to_distribution

from .coordinate_manager import CoordinateManager, Sites, reach, scattered
from .partition import COLUMNS, Partition
from .site_halo import SiteHalo, at_owners, swapped
from .tensor import SparseTensor

T = TypeVar("T")


class DistributedManager(CoordinateManager):
    """Sets of sites that are split over the ranks of ``partition``; every method is collective.

    Of each set this rank has the sites in its box: a site, or the corner of a coarse cell, belongs to one rank.
    """

    def __init__(self, batch_size: int, partition: Partition) -> None:
        super().__init__(batch_size)
        self.partition = partition
        self._halos: dict[tuple[Sites, tuple[int, ...], tuple[int, ...]], SiteHalo] = {}
        self._layouts: dict[Sites, Distribution[ProcessGrid]] = {}
        self._populations: dict[Sites, torch.Tensor] = {}

    # -- what layers ask for ------------------------------------------------------------------------------------------

    def layout(self, sites: Sites) -> Distribution[ProcessGrid]:
        """How rows of features of ``sites`` are split: rank after rank, each as many as it has sites."""
        if sites not in self._layouts:
            grid = self.partition.grid
            counts = grid.world.allgather(len(sites.coords))
            ends = tuple(np.cumsum([0, *counts]).tolist())
            self._layouts[sites] = Distribution(grid.flat, ("n", None), boundaries={"n": ends})
        return self._layouts[sites]

    def rows(self, sites: Sites) -> int:
        """Sites of all ranks."""
        layout = self.layout(sites)
        return layout.boundaries["n"][-1]

    def arranged(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """``features`` of all of ``sites``, each row where its site is. Collective where they have to move.

        Raises
        ------
        ShapeError
            If they are a plain tensor.
        """
        layout = self.layout(sites)
        if not isinstance(features, DistTensor):
            raise ShapeError(
                f"features of sites over {self.partition.grid!r} must be a DistTensor; found a plain tensor of shape "
                f"{tuple(features.shape)}: make new ones with distconv.layers.sparse.scatter or from_local"
            )
        return features if features.dist == layout else features.redistribute(layout)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, whole on every rank, as it enters work on some of the sites."""
        return whole_over(tensor, Distribution(self.partition.grid.flat, ("n",)))

    def needed(
        self,
        features: torch.Tensor,
        inputs: Sites,
        outputs: Sites,
        offsets: Offsets,
        dilation: int,
        *,
        transposed: bool = False,
    ) -> tuple[torch.Tensor, KernelMap]:
        """Features of this rank's sites of ``inputs`` and of the halo, and the map from them to its ``outputs``."""
        unit = (outputs if transposed else inputs).stride * dilation
        low, high = reach(offsets, unit, transposed=transposed)
        halo = self._halo(inputs, tuple(low), tuple(high))
        key = (halo, outputs, offsets, dilation, transposed)
        pairs = self._mapped(key, lambda: _map(halo, outputs, offsets, unit, transposed))
        return halo.extended(self.local(features)), pairs

    def _halo(self, sites: Sites, low: tuple[int, ...], high: tuple[int, ...]) -> SiteHalo:
        key = (sites, low, high)
        if key not in self._halos:
            self._halos[key] = SiteHalo(self.partition, sites.coords, low, high)
        return self._halos[key]

    def local(self, features: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``features``."""
        assert isinstance(features, DistTensor)
        return features.local

    def result(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Features of all of ``sites``, given this rank's."""
        layout = self.layout(sites)
        return DistTensor(features, layout, (layout.boundaries["n"][-1], features.shape[1]))

    def settled(self, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
        """Those of the sites that all ranks made which are this rank's."""
        return at_owners(self.partition, coords, low, high)

    def coords(self, sites: Sites) -> DistTensor:
        """Coordinates of the sites of all ranks, (N, 1 + D), whose rows are distributed as those of features."""
        layout = self.layout(sites)
        return DistTensor(sites.coords, layout, (layout.boundaries["n"][-1], sites.coords.shape[1]))

    def all_ranks(self, value: T) -> list[T]:
        """``value`` of each rank."""
        return list(self.partition.grid.world.allgather(value))

    def volume(
        self, features: torch.Tensor, cells: torch.Tensor, stride: int, origin: Sequence[int], size: Sequence[int]
    ) -> DistTensor:
        """The dense volume (B, C, *size) in balanced blocks over the partition's grid."""
        grid, axes = self.partition.grid, COLUMNS[len(size)]
        scales = [(1, 0), *((stride, start) for start in origin)]
        ends = {}
        for axis, cuts, extent, (step, start) in zip(
            axes, self.partition.cuts, (self.batch_size, *size), scales, strict=True
        ):
            if axis is not None and cuts:
                # Coordinates are multiples of the step, so those below a cut are in the cells below its multiple.
                cells_below = (-(-cut // step) + (-start) // step for cut in cuts)
                ends[axis] = (0, *(min(max(cell, 0), extent) for cell in cells_below), extent)
        dims = (axes[0], None, *axes[1:])
        owned = Distribution(grid, dims, boundaries=ends)
        shape = (self.batch_size, features.shape[1], *size)
        samples, _, *space = owned.box(None, shape)
        first = torch.tensor([samples.start, *(interval.start for interval in space)], device=cells.device)
        extents = [interval.stop - interval.start for interval in (samples, *space)]
        block = scattered(self.local(features), cells - first, extents)
        return DistTensor(block, owned, shape).redistribute(Distribution(grid, dims))

    # -- over samples -------------------------------------------------------------------------------------------------

    def population(self, sites: Sites) -> torch.Tensor:
        """Sites of each sample on all ranks, (B,)."""
        if sites not in self._populations:
            here = super().population(sites)
            self._populations[sites] = allreduce(self.partition.grid.world, here, "sites of samples")
        return self._populations[sites]

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of ``values`` (B, C)."""
        return self._of_ranks(values).sum(0)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks of ``values`` (B, C)."""
        return self._of_ranks(values).max(0).values

    def _of_ranks(self, values: torch.Tensor) -> DistTensor:
        grid = self.partition.grid.flat
        return DistTensor(values[None], Distribution(grid, ("n", None, None)), (grid.size, *values.shape))


def _map(halo: SiteHalo, outputs: Sites, offsets: Offsets, unit: int, transposed: bool) -> KernelMap:
    if transposed:
        return kernel_map(outputs.coords, halo.coords, offsets, unit, outputs.order).transposed()
    return kernel_map(halo.coords, outputs.coords, offsets, unit, sorting_order(halo.coords))


def scatter(x: SparseTensor, grid: ProcessGrid, partition: Partition | None = None) -> SparseTensor:
    """``x``, the same on all ranks, split over ``grid``: samples over n, space over d, h and w. Collective.

    Boxes come from ``partition``; left out, their cuts give each rank about as many sites. Differentiable.

    Raises
    ------
    DistributionError
        If the grid has an axis that cuts nothing here.
    MismatchError
        If coordinates, cuts, or shape and dtype of the features, differ between ranks.
    """
    described = f"{tuple(x.shape)} {x.dtype}, stride {x.stride}, batch of {x.batch_size}, sites {_digest(x.coords)}"
    cuts = "balanced" if partition is None else partition.cuts
    check_same_on_all_ranks(grid.world, "sparse scatter", f"{described}, cuts {cuts}")
    parts = partition or Partition.balanced(grid, x.coords)
    if parts.grid is not grid or parts.dimension != x.dimension:
        raise DistributionError(f"a partition of {parts.dimension} dimensions over {parts.grid!r} does not fit {x!r}")
    owners = parts.owners(x.coords)
    order = owners.argsort(stable=True)
    manager = DistributedManager(x.batch_size, parts)
    sites = Sites(x.coords[owners == grid.rank], x.stride)
    return SparseTensor.on(sites, manager, scatter_dense(x.features[order], manager.layout(sites)))


def gather(x: SparseTensor) -> SparseTensor:
    """The whole of a split sparse tensor on every rank, its sites sorted. Collective and differentiable."""
    manager = x.coordinate_manager
    if not isinstance(manager, DistributedManager):
        return x
    grid = manager.partition.grid
    others = [rank for rank in range(grid.size) if rank != grid.rank]
    here = x.sites.coords
    received = swapped(grid.world, dict.fromkeys(others, here), others, here, "gathered sites")
    coords = torch.cat([{grid.rank: here, **received}[rank] for rank in range(grid.size)])
    order = sorting_order(coords)
    features = x.features.gather() if isinstance(x.features, DistTensor) else x.features
    return SparseTensor(coords[order], features[order], x.stride, batch_size=x.batch_size)


def from_local(coords: torch.Tensor, features: torch.Tensor, partition: Partition, batch_size: int) -> SparseTensor:
    """A split sparse tensor of which this rank has ``coords`` (N, 1 + D) and ``features`` (N, C). Collective.

    Raises
    ------
    MismatchError
        If channels, dtypes, batch sizes or cuts differ between ranks.
    CoordinateError
        On all ranks, if coordinates and features of one of them make no sparse tensor.
    DistributionError
        On all ranks, if one of them has a site that is not in its box.
    """
    world = partition.grid.world
    described = f"{tuple(features.shape[1:])} {features.dtype}, batch of {batch_size}, cuts {partition.cuts}"
    check_same_on_all_ranks(world, "sparse from_local", described)
    local = try_on_all_ranks(world, lambda: SparseTensor(coords, features, batch_size=batch_size), CoordinateError)
    foreign = int((partition.owners(local.sites.coords) != partition.grid.rank).sum())
    counts = world.allgather(foreign)
    if any(counts):
        worst = int(np.argmax(counts))
        raise DistributionError(
            f"sparse from_local: {counts[worst]} sites of rank {worst} are not in its box {partition.box(worst)}; send "
            "them to their owners, or scatter the whole"
        )
    manager = DistributedManager(batch_size, partition)
    return SparseTensor.on(local.sites, manager, manager.result(features, local.sites))


def sites_of_blocks(volume: DistTensor, active: torch.Tensor, stride: int) -> SparseTensor:
    """Return the ``active`` sites of a volume (B, C, ...), each on the rank whose block of the volume it lies in."""
    grid, axes = volume.grid, COLUMNS[volume.dim() - 2]
    owned = Distribution(grid, (axes[0], None, *axes[1:]))
    block = volume.redistribute(owned)
    mask = to_distribution(active, Distribution(grid, axes)).local
    extents = (volume.shape[0], *volume.shape[2:])
    steps = (1, *(stride,) * (len(axes) - 1))
    cuts = tuple(
        tuple(block_range(extent, parts, index).start * step for index in range(1, parts))
        for extent, step, parts in zip(extents, steps, (grid.shape[a] if a else 1 for a in axes), strict=True)
    )
    manager = DistributedManager(volume.shape[0], Partition(grid, cuts))
    cells = mask.nonzero()
    samples, _, *space = owned.box(None, volume.shape)
    first = torch.tensor([samples.start, *(interval.start for interval in space)], device=cells.device)
    sites = Sites((cells + first) * torch.tensor(steps, device=cells.device), stride)
    features = block.local.movedim(1, -1)[cells.unbind(1)]
    return SparseTensor.on(sites, manager, manager.result(features, sites))


def _digest(coords: torch.Tensor) -> str:
    return hashlib.blake2b(coords.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
