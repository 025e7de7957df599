"""Sets of sites and the kernel maps between them, shared by related tensors.

Layers obtain output sites, kernel maps and gathered features from the manager of their input. Here all sites are on one
rank, so the methods of the last section have nothing to exchange. ``DistributedManager`` overrides them for sites that
are split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from distconv.errors import CoordinateError
from distconv.kernels.sparse import KernelMap, coarsen, kernel_map, reachable_sites, sorting_order
from distconv.kernels.sparse.coordinates import Offsets

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Sites:
    """A set of active sites: coordinates (N, 1 + D), multiples of ``stride``, in steps of the finest grid.

    Sets are compared by identity, and are keys of caches. ``coords`` must not be changed.
    """

    coords: torch.Tensor
    stride: int
    finer: Sites | None = None
    """The set from which a stride has derived these sites, or None. Transposed layers return to it."""
    is_sorted: bool = False
    """True if the rows are known to be sorted. Otherwise ``order`` sorts them."""

    @cached_property
    def order(self) -> torch.Tensor | None:
        """Permutation that sorts the rows; None if they are sorted."""
        return None if self.is_sorted else sorting_order(self.coords)

    def has_same_sites(self, other: Sites) -> bool:
        """Return True if both have the same sites in the same rows."""
        return self is other or (self.stride == other.stride and torch.equal(self.coords, other.coords))


class CoordinateManager:
    """The sets of sites that layers derive from one another, and their kernel maps, each computed once.

    Tensors that are derived from one another share a manager, and it exists as long as they do. A map serves the
    forward and backward pass of all layers with the same kernel, and the transposed convolution in the opposite
    direction. ``hits`` and ``misses`` count requests for kernel maps.

    Parameters
    ----------
    batch_size : int
        Number of samples.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.hits = self.misses = 0
        self._maps: dict[Hashable, KernelMap] = {}
        self._sets: dict[Hashable, Sites] = {}

    def coarser_sites(self, sites: Sites, factor: int) -> Sites:
        """Return the coarse cells that hold some sites.

        Parameters
        ----------
        sites : Sites
        factor : int
            Edge of a coarse cell, in cells of ``sites``.

        Returns
        -------
        Sites
            ``sites`` itself for a factor of 1.
        """
        stride = sites.stride * factor

        def make() -> Sites:
            dimensions = sites.coords.shape[1] - 1
            coords = self.move_to_owners(coarsen(sites.coords, stride), (1 - stride,) * dimensions, (0,) * dimensions)
            return Sites(coords, stride, sites, is_sorted=True)

        return sites if factor == 1 else _get_or_make(self._sets, (sites, factor), make)

    def finer_sites(self, sites: Sites, factor: int, offsets: Offsets, dilation: int) -> Sites:
        """Return the finer sites for a transposed convolution.

        Parameters
        ----------
        sites : Sites
        factor : int
            Stride of the convolution.
        offsets : tuple of tuple of int
        dilation : int

        Returns
        -------
        Sites
            The set of this stride from which ``sites`` have been derived. If there is none, all sites that the kernel
            reaches.

        Raises
        ------
        CoordinateError
            If the stride of the sites is not a multiple of the factor.
        """
        if sites.stride % factor:
            raise CoordinateError(
                f"a transposed convolution of stride {factor} needs sites whose stride it divides, not {sites.stride}: "
                f"give the SparseTensor coordinates in steps of {factor} and stride={factor}"
            )
        stride = sites.stride // factor
        # Several strides may lie between the two layers of a skip connection.
        finer = sites.finer
        while finer is not None and finer.stride > stride:
            finer = finer.finer
        if finer is not None and finer.stride == stride:
            return finer
        return self._all_reachable_sites(sites, stride, offsets, dilation)

    def wider_sites(self, sites: Sites, offsets: Offsets, dilation: int) -> Sites:
        """Return all sites of the same stride that a kernel reaches from some sites.

        Parameters
        ----------
        sites : Sites
        offsets : tuple of tuple of int
        dilation : int

        Returns
        -------
        Sites
        """
        return self._all_reachable_sites(sites, sites.stride, offsets, dilation)

    def gather_needed(
        self,
        features: torch.Tensor,
        inputs: Sites,
        outputs: Sites,
        offsets: Offsets,
        dilation: int,
        *,
        transposed: bool = False,
    ) -> tuple[torch.Tensor, KernelMap]:
        """Return the features that a layer needs, and the kernel map from their rows to the output sites.

        Parameters
        ----------
        features : Tensor
            Features of ``inputs``.
        inputs, outputs : Sites
        offsets : tuple of tuple of int
            In steps of ``dilation`` fine cells: input = output + offset.
        dilation : int
        transposed : bool
            True for output = input + offset. Otherwise input = output + offset.

        Returns
        -------
        tuple of Tensor and KernelMap
        """
        # The finer set comes first in the key, so a transposed convolution finds the map of the opposite convolution.
        fine, coarse = (outputs, inputs) if transposed else (inputs, outputs)
        unit = fine.stride * dilation
        pairs = self._cached_map(
            (fine, coarse, offsets, dilation),
            lambda: kernel_map(fine.coords, coarse.coords, offsets, unit, fine.order),
        )
        return features, pairs.transposed() if transposed else pairs

    @property
    def bytes(self) -> int:
        """Memory of the stored kernel maps."""
        return sum(pairs.bytes for pairs in self._maps.values())

    def _cached_map(self, key: Hashable, make: Callable[[], KernelMap]) -> KernelMap:
        if key in self._maps:
            self.hits += 1
            return self._maps[key]
        mapping = make()
        self.misses += 1
        self._maps[key] = mapping
        return mapping

    def _all_reachable_sites(self, sites: Sites, stride: int, offsets: Offsets, dilation: int) -> Sites:
        def make() -> Sites:
            unit = stride * dilation
            coords = self.move_to_owners(reachable_sites(sites.coords, offsets, unit), *offset_bounds(offsets, unit))
            # A kernel with its centre reaches at least the sites themselves. If their number has not grown on any rank,
            # the set is the same, and is reused with its kernel maps.
            centred = (0,) * (coords.shape[1] - 1) in offsets and stride == sites.stride
            if centred and all(self.gather_values(len(coords) == len(sites.coords))):
                return sites
            return Sites(coords, stride, sites.finer, is_sorted=True)

        return _get_or_make(self._sets, (sites, stride, offsets, dilation), make)

    # -- methods that differ if sites are split over ranks ------------------------------------------------------------

    def row_count(self, sites: Sites) -> int:
        """Return the number of rows of features of ``sites``."""
        return len(sites.coords)

    def redistribute_features(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Return features of all of ``sites``, distributed as the sites are.

        Parameters
        ----------
        features : Tensor
            Features (N, C) in the order of the rows of all sites.
        sites : Sites

        Returns
        -------
        Tensor
        """
        return features

    def replicate_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter for work on the sites."""
        return tensor

    def local_rows(self, features: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``features`` that belong to this rank's coordinates."""
        return features

    def wrap_features(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Return features of all of ``sites``, given those of this rank.

        Parameters
        ----------
        features : Tensor
            Features (N, C) of this rank's sites.
        sites : Sites

        Returns
        -------
        Tensor
        """
        return features

    def move_to_owners(self, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
        """Return the sites that this rank owns among those that all ranks have derived.

        Parameters
        ----------
        coords : Tensor
            Sites (N, 1 + D) that this rank has derived from its own.
        low, high : sequence of int
            Smallest and largest displacement of a derived site from its source, for each spatial dimension.

        Returns
        -------
        Tensor
            (N', 1 + D).
        """
        return coords

    def row_coords(self, sites: Sites) -> torch.Tensor:
        """Return coordinates (N, 1 + D) in the order of the rows of features."""
        return sites.coords

    def gather_values(self, value: Value) -> list[Value]:
        """Return ``value`` of each rank that has some of the sites."""
        return [value]

    def dense_volume(
        self, features: torch.Tensor, cells: torch.Tensor, stride: int, origin: Sequence[int], size: Sequence[int]
    ) -> torch.Tensor:
        """Return the dense volume with features in some cells and zeros elsewhere.

        Parameters
        ----------
        features : Tensor
            Features (N, C) of all sites.
        cells : Tensor
            The cells (N, 1 + D) of this rank's sites, counted from ``origin``.
        stride : int
            Edge of a cell.
        origin : sequence of int
            Coordinates of the first cell.
        size : sequence of int
            Number of cells along each dimension.

        Returns
        -------
        Tensor
            ``(B, C, *size)``.
        """
        return scatter_to_volume(features, cells, (self.batch_size, *size))

    def sites_per_sample(self, sites: Sites) -> torch.Tensor:
        """Return the number of sites of each sample, (B,)."""
        return torch.bincount(sites.coords[:, 0], minlength=self.batch_size)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums of samples (B, C), given the sums of this rank's sites."""
        return values

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return maxima of samples (B, C), given the maxima of this rank's sites."""
        return values


def scatter_to_volume(features: torch.Tensor, cells: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return a dense volume with features in some cells and zeros elsewhere.

    Parameters
    ----------
    features : Tensor
        (N, C).
    cells : Tensor
        Integers (N, 1 + D).
    size : sequence of int
        Shape (B, ...) of the volume without channels.

    Returns
    -------
    Tensor
        (B, C, ...).
    """
    volume = features.new_zeros(*size, features.shape[1])
    return volume.index_put(cells.unbind(1), features).movedim(-1, 1).contiguous()


def offset_bounds(offsets: Offsets, unit: int, *, transposed: bool = False) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest offset along each dimension.

    Parameters
    ----------
    offsets : tuple of tuple of int
    unit : int
        Factor of the offsets, in cells of the finest grid.
    transposed : bool
        True if the offsets lead from inputs to outputs. Otherwise from outputs to inputs.

    Returns
    -------
    tuple of list and list
        From outputs to inputs, one entry for each spatial dimension.
    """
    along = list(zip(*offsets, strict=True))
    low, high = [unit * min(steps) for steps in along], [unit * max(steps) for steps in along]
    return ([-h for h in high], [-v for v in low]) if transposed else (low, high)


def _get_or_make(cache: dict[Hashable, Any], key: Hashable, make: Callable[[], Value]) -> Value:
    """Return the cached value of a key, which ``make`` returns at the first request."""
    if key not in cache:
        cache[key] = make()
    value: Value = cache[key]
    return value
