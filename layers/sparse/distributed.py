"""Sparse tensors that are split over ranks.

Each rank has the sites in a box of samples and space (:mod:`~distconv.layers.sparse.partition`), and layers exchange
halos of sites. The features are a DistTensor whose blocks of rows have as many rows as the ranks have sites. So batch
norm, linear layers, losses and gradients of parameters are those of any DistTensor. Layers with windows obtain features
and kernel maps from :class:`DistributedManager`.

::

    x = scatter(SparseTensor(coords, features), grid)   # boxes with about as many sites each
    loss = F.cross_entropy(model(x), labels)            # any model of sparse layers and ordinary modules on features
    loss.backward()
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.communication.transport import allreduce
from distconv.distribution import Distribution, block_range
from distconv.errors import CoordinateError, DistributionError, ShapeError
from distconv.grid import ProcessGrid
from distconv.kernels.sparse import KernelMap, kernel_map, sorting_order
from distconv.kernels.sparse.coordinates import Offsets, Stride, stride_per_dim
from distconv.layers.common.alignment import replicate_parameter
from distconv.placement import scatter as scatter_dense
from distconv.tensor import DistTensor, to_distribution

from .coordinate_manager import CoordinateManager, Sites, offset_bounds, scatter_to_volume
from .partition import COLUMNS, Partition
from .site_halo import RowExchange, SiteHalo, exchange_rows, send_to_owners
from .tensor import SparseTensor

T = TypeVar("T")


class DistributedManager(CoordinateManager):
    """Sets of sites that are split over the ranks of a partition.

    Collective: call every method on every rank. Of each set this rank has the sites in its box. A site, or the lower
    corner of a coarse cell, belongs to one rank.

    Parameters
    ----------
    batch_size : int
        Number of samples.
    partition : Partition
    """

    def __init__(self, batch_size: int, partition: Partition) -> None:
        super().__init__(batch_size)
        self.partition = partition
        self._halos: dict[tuple[Sites, tuple[int, ...], tuple[int, ...]], SiteHalo] = {}
        self._layouts: dict[Sites, Distribution[ProcessGrid]] = {}
        self._populations: dict[Sites, torch.Tensor] = {}

    # -- operations for layers ----------------------------------------------------------------------------------------

    def layout(self, sites: Sites) -> Distribution[ProcessGrid]:
        """Return the distribution of the rows of features: rank after rank, each with as many rows as it has sites.

        Collective at its first use for ``sites``.

        Parameters
        ----------
        sites : Sites

        Returns
        -------
        Distribution
        """
        # All ranks derive the same sets in the same order, so they miss the cache at the same calls.
        if sites not in self._layouts:
            grid = self.partition.grid
            counts = grid.world.allgather(len(sites.coords))
            ends = tuple(np.cumsum([0, *counts]).tolist())
            self._layouts[sites] = Distribution(grid.flat, ("n", None), boundaries={"n": ends})
        return self._layouts[sites]

    def row_count(self, sites: Sites) -> int:
        """Return the number of sites on all ranks."""
        layout = self.layout(sites)
        return layout.boundaries["n"][-1]

    def redistribute_features(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Return features of all of ``sites``, distributed as the sites are. Collective if rows have to move.

        Parameters
        ----------
        features, sites
            As in :meth:`CoordinateManager.redistribute_features`.

        Returns
        -------
        DistTensor

        Raises
        ------
        ShapeError
            If the features are a plain tensor.
        """
        layout = self.layout(sites)
        if not isinstance(features, DistTensor):
            raise ShapeError(
                f"features of sites over {self.partition.grid!r} must be a DistTensor, not a plain tensor of shape "
                f"{tuple(features.shape)}. Create them with distconv.layers.sparse.scatter or from_local."
            )
        return features if features.dist == layout else features.redistribute(layout)

    def replicate_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full parameter whose gradient is all-reduced. Collective."""
        return replicate_parameter(tensor, Distribution(self.partition.grid.flat, ("n",)))

    def gather_needed(
        self,
        features: torch.Tensor,
        inputs: Sites,
        outputs: Sites,
        offsets: Offsets,
        *,
        transposed: bool = False,
    ) -> tuple[torch.Tensor, KernelMap]:
        """Return features of this rank's sites and of the halo, and the kernel map from them to its output sites.

        Collective: call on every rank.

        Parameters
        ----------
        features, inputs, outputs, offsets, transposed
            As in :meth:`CoordinateManager.gather_needed`.

        Returns
        -------
        tuple of Tensor and KernelMap
        """
        unit = (outputs if transposed else inputs).stride
        low, high = offset_bounds(offsets, unit, transposed=transposed)
        reach = (inputs, tuple(low), tuple(high))
        if reach not in self._halos:
            self._halos[reach] = SiteHalo(self.partition, inputs.coords, low, high)
        halo = self._halos[reach]

        def make() -> KernelMap:
            # From this rank's sites and its halo to its output sites.
            if transposed:
                return kernel_map(outputs.coords, halo.coords, offsets, unit, outputs.order).transposed()
            return kernel_map(halo.coords, outputs.coords, offsets, unit, sorting_order(halo.coords))

        # By halo and not by inputs: other offsets of the same extent share a halo, and its rows are those of the map.
        pairs = self._cached_map((halo, outputs, offsets, transposed), make)
        return halo.send(self.local_rows(features)), pairs

    def local_rows(self, features: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``features``."""
        assert isinstance(features, DistTensor)
        return features.local

    def wrap_features(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Return features of all of ``sites``, given those of this rank.

        Parameters
        ----------
        features, sites
            As in :meth:`CoordinateManager.wrap_features`.

        Returns
        -------
        DistTensor
        """
        layout = self.layout(sites)
        return DistTensor(features, layout, (layout.boundaries["n"][-1], features.shape[1]))

    def move_to_owners(self, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
        """Return the sites that this rank owns among those that all ranks have derived. Collective.

        Parameters
        ----------
        coords, low, high
            As in :meth:`CoordinateManager.move_to_owners`.

        Returns
        -------
        Tensor
        """
        return send_to_owners(self.partition, coords, low, high)

    def row_coords(self, sites: Sites) -> DistTensor:
        """Return coordinates (N, 1 + D) of the sites of all ranks, whose rows are distributed as those of features."""
        layout = self.layout(sites)
        return DistTensor(sites.coords, layout, (layout.boundaries["n"][-1], sites.coords.shape[1]))

    def gather_values(self, value: T) -> list[T]:
        """Return ``value`` of each rank. Collective."""
        return list(self.partition.grid.world.allgather(value))

    def dense_volume(
        self, features: torch.Tensor, cells: torch.Tensor, stride: Stride, origin: Sequence[int], size: Sequence[int]
    ) -> DistTensor:
        """Return the dense volume ``(B, C, *size)`` in balanced blocks over the partition's grid. Collective.

        Parameters
        ----------
        features, cells, stride, origin, size
            As in :meth:`CoordinateManager.dense_volume`.

        Returns
        -------
        DistTensor
        """
        grid, axes = self.partition.grid, COLUMNS[len(size)]
        scales = [(1, 0), *zip(stride, origin, strict=True)]
        ends = {}
        for axis, cuts, extent, (step, start) in zip(
            axes, self.partition.cuts, (self.batch_size, *size), scales, strict=True
        ):
            if axis is not None and cuts:
                # Coordinates are multiples of the step, so those below a cut are in the cells below its multiple.
                cells_below = (-(-cut // step) + (-start) // step for cut in cuts)
                ends[axis] = (0, *(min(max(cell, 0), extent) for cell in cells_below), extent)
        # 1. Each rank fills its box of cells. 2. The boxes become balanced blocks, which dense layers require.
        dims = (axes[0], None, *axes[1:])
        owned = Distribution(grid, dims, boundaries=ends)
        shape = (self.batch_size, features.shape[1], *size)
        samples, _, *space = owned.box(None, shape)
        first = torch.tensor([samples.start, *(interval.start for interval in space)], device=cells.device)
        extents = [interval.stop - interval.start for interval in (samples, *space)]
        block = scatter_to_volume(self.local_rows(features), cells - first, extents)
        return DistTensor(block, owned, shape).redistribute(Distribution(grid, dims))

    def has_same_owners(self, other: CoordinateManager) -> bool:
        """Return True if the same ranks own the sites of another manager's sets."""
        return isinstance(other, DistributedManager) and other.partition == self.partition

    def split_rows(self, rows: torch.Tensor) -> DistTensor:
        """Return rows that are split over the ranks of the sites, in blocks of any size. Collective.

        Parameters
        ----------
        rows
            As in :meth:`CoordinateManager.split_rows`.

        Returns
        -------
        DistTensor
            ``rows`` itself if they are already split over the flat grid. Otherwise they are in balanced blocks.
        """
        grid = self.partition.grid.flat
        if isinstance(rows, DistTensor) and rows.grid == grid and rows.dist.axes == ("n", None):
            return rows
        return to_distribution(rows, Distribution(grid, ("n", None)))

    def at_owners(
        self,
        rows: torch.Tensor,
        site_of: Callable[[torch.Tensor], torch.Tensor],
        compute: Callable[[torch.Tensor], torch.Tensor],
    ) -> DistTensor:
        """Return values of rows, each computed on the rank that owns a site of the row. Collective.

        Parameters
        ----------
        rows, site_of, compute
            As in :meth:`CoordinateManager.at_owners`.

        Returns
        -------
        DistTensor
        """
        assert isinstance(rows, DistTensor)
        plan = RowExchange.to_owners(self.partition.grid.world, self.partition.owners(site_of(rows.local.detach())))
        values = plan.send_back(compute(plan.send(rows.local)))
        return DistTensor(values, rows.dist, (len(rows), values.shape[1]))

    # -- over samples -------------------------------------------------------------------------------------------------

    def sites_per_sample(self, sites: Sites) -> torch.Tensor:
        """Return the number of sites of each sample on all ranks, (B,). Collective at its first use."""
        if sites not in self._populations:
            counts = super().sites_per_sample(sites)
            self._populations[sites] = allreduce(self.partition.grid.world, counts, "sites of samples")
        return self._populations[sites]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of ``values`` (B, C). Collective."""
        return self._of_ranks(values).sum(0)

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks of ``values`` (B, C). Collective."""
        return self._of_ranks(values).max(0).values

    def _of_ranks(self, values: torch.Tensor) -> DistTensor:
        """Return the values of all ranks (P, B, C), split over the first dimension."""
        grid = self.partition.grid.flat
        return DistTensor(values[None], Distribution(grid, ("n", None, None)), (grid.size, *values.shape))


def scatter(x: SparseTensor, grid: ProcessGrid, partition: Partition | None = None) -> SparseTensor:
    """Split a sparse tensor that is identical on all ranks over a grid.

    Collective: call on every rank. Samples are split over axis n, and space over d, h and w. Differentiable.

    Parameters
    ----------
    x : SparseTensor
    grid : ProcessGrid
    partition : Partition, optional
        The boxes of the ranks (default: boxes with about as many sites each).

    Returns
    -------
    SparseTensor

    Raises
    ------
    DistributionError
        If the grid has an axis that cuts nothing, or the partition does not fit ``x`` or the grid.
    MismatchError
        If coordinates, cuts, or shape and dtype of the features differ between ranks.
    """
    # Ranks with other sites would compute other cuts and owners, and sites would be lost or doubled.
    digest = hashlib.blake2b(x.coords.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    shape = f"shape {x.spatial_shape}, batch of {x.batch_size}"
    description = f"{tuple(x.shape)} {x.dtype}, stride {x.stride}, {shape}, sites {digest}"
    cuts = "balanced" if partition is None else partition.cuts
    check_same_on_all_ranks(grid.world, "sparse scatter", f"{description}, cuts {cuts}")
    parts = partition or Partition.balanced(grid, x.coords)
    if parts.grid is not grid or parts.dimension != x.dimension:
        raise DistributionError(f"a partition of {parts.dimension} dimensions over {parts.grid!r} does not fit {x!r}")
    # Rows are ordered by owner for the layout; stable, so that a rank's rows keep the order of its sites.
    owners = parts.owners(x.coords)
    order = owners.argsort(stable=True)
    manager = DistributedManager(x.batch_size, parts)
    sites = replace(x.sites, coords=x.coords[owners == grid.rank], source=None)
    return SparseTensor.on(sites, manager, scatter_dense(x.features[order], manager.layout(sites)))


def gather(x: SparseTensor) -> SparseTensor:
    """Return the full sparse tensor on every rank, with sorted sites.

    Collective: call on every rank. Differentiable.

    Parameters
    ----------
    x : SparseTensor

    Returns
    -------
    SparseTensor
        ``x`` itself if it is not split.
    """
    manager = x.coordinate_manager
    if not isinstance(manager, DistributedManager):
        return x
    grid = manager.partition.grid
    others = [rank for rank in range(grid.size) if rank != grid.rank]
    own_coords = x.sites.coords
    received = exchange_rows(grid.world, dict.fromkeys(others, own_coords), others, own_coords, "gathered sites")
    coords = torch.cat([{grid.rank: own_coords, **received}[rank] for rank in range(grid.size)])
    # Sorted, so that the result does not depend on the partition.
    order = sorting_order(coords)
    features = x.features.gather() if isinstance(x.features, DistTensor) else x.features
    sites = Sites(coords[order], x.sites.stride, is_sorted=True, spatial_shape=x.spatial_shape)
    return SparseTensor.on(sites, CoordinateManager(x.batch_size), features[order])


def from_local(coords: torch.Tensor, features: torch.Tensor, partition: Partition, batch_size: int) -> SparseTensor:
    """Return a split sparse tensor from the sites and features of each rank.

    Collective: call on every rank.

    Parameters
    ----------
    coords : Tensor
        This rank's sites (N, 1 + D), all of which are in its box.
    features : Tensor
        This rank's features (N, C).
    partition : Partition
    batch_size : int
        Number of samples of all ranks.

    Returns
    -------
    SparseTensor

    Raises
    ------
    MismatchError
        If channels, dtypes, batch sizes or cuts differ between ranks.
    CoordinateError
        On all ranks, if coordinates and features of one of them are not a valid sparse tensor.
    DistributionError
        On all ranks, if one of them has a site that is not in its box.
    """
    world = partition.grid.world
    described = f"{tuple(features.shape[1:])} {features.dtype}, batch of {batch_size}, cuts {partition.cuts}"
    check_same_on_all_ranks(world, "sparse from_local", described)
    local = try_on_all_ranks(world, lambda: SparseTensor(coords, features, batch_size=batch_size), CoordinateError)
    # The counts of all ranks, so that all raise the same error.
    foreign = int((partition.owners(local.sites.coords) != partition.grid.rank).sum())
    counts = world.allgather(foreign)
    if any(counts):
        worst = int(np.argmax(counts))
        raise DistributionError(
            f"sparse from_local: {counts[worst]} sites of rank {worst} are not in its box {partition.box(worst)}. Send "
            "them to their owners, or scatter the full tensor."
        )
    manager = DistributedManager(batch_size, partition)
    return SparseTensor.on(local.sites, manager, manager.wrap_features(features, local.sites))


def sparse_from_blocks(volume: DistTensor, active: torch.Tensor, stride: int | Sequence[int]) -> SparseTensor:
    """Return the active sites of a dense volume, each on the rank whose block of the volume contains it.

    Collective: call on every rank.

    Parameters
    ----------
    volume : DistTensor
        (B, C, ...).
    active : Tensor or DistTensor
        Booleans (B, ...).
    stride : int or sequence of int
        Edge of a cell, in cells of the finest grid: one number, or one for each dimension.

    Returns
    -------
    SparseTensor
    """
    grid, axes = volume.grid, COLUMNS[volume.dim() - 2]
    owned = Distribution(grid, (axes[0], None, *axes[1:]))
    block = volume.redistribute(owned)
    mask = to_distribution(active, Distribution(grid, axes)).local
    extents = (volume.shape[0], *volume.shape[2:])
    strides = stride_per_dim(stride, len(axes) - 1)
    steps = (1, *strides)
    # The edges of the volume's balanced blocks, in steps of the finest grid: no site has to move.
    cuts = tuple(
        tuple(block_range(extent, parts, index).start * step for index in range(1, parts))
        for extent, step, parts in zip(extents, steps, (grid.shape[a] if a else 1 for a in axes), strict=True)
    )
    manager = DistributedManager(volume.shape[0], Partition(grid, cuts))
    cells = mask.nonzero()
    samples, _, *space = owned.box(None, volume.shape)
    first = torch.tensor([samples.start, *(interval.start for interval in space)], device=cells.device)
    sites = Sites((cells + first) * torch.tensor(steps, device=cells.device), strides)
    features = block.local.movedim(1, -1)[cells.unbind(1)]
    return SparseTensor.on(sites, manager, manager.wrap_features(features, sites))
