"""Sets of sites and the kernel maps between them, shared by related tensors.

Layers obtain output sites, kernel maps and gathered features from the manager of their input. Here all sites are on one
rank, so the methods of the last section have nothing to exchange. ``DistributedManager`` overrides them for sites that
are split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from distconv.errors import CoordinateError
from distconv.kernels.sparse import KernelMap, coarsen, kernel_map, reachable_sites, sorting_order
from distconv.kernels.sparse.coordinates import Offsets, Stride, are_multiples, is_in_volume, unique_rows

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Sites:
    """A set of active sites: coordinates (N, 1 + D), multiples of ``stride``, in steps of the finest grid.

    Sets are compared by identity, and are keys of caches. ``coords`` must not be changed.
    """

    coords: torch.Tensor
    stride: Stride
    source: Sites | None = None
    """The set from which a layer has derived these sites, or None. Transposed layers return to it."""
    is_sorted: bool = False
    """True if the rows are known to be sorted. Otherwise ``order`` sorts them."""
    spatial_shape: tuple[int, ...] | None = None
    """Number of cells of ``stride`` along each dimension, from 0; None if space has no borders."""

    @cached_property
    def order(self) -> torch.Tensor | None:
        """Permutation that sorts the rows; None if they are sorted."""
        return None if self.is_sorted else sorting_order(self.coords)


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

    def coarser_sites(self, sites: Sites, factors: Sequence[int]) -> Sites:
        """Return the coarse cells that hold some sites.

        Parameters
        ----------
        sites : Sites
        factors : sequence of int
            Edge of a coarse cell along each dimension, in cells of ``sites``.

        Returns
        -------
        Sites
            ``sites`` itself if all factors are 1.
        """
        stride = tuple(s * f for s, f in zip(sites.stride, factors, strict=True))

        def make() -> Sites:
            coords = self.move_to_owners(coarsen(sites.coords, stride), [1 - s for s in stride], [0] * len(stride))
            shape = sites.spatial_shape and tuple(-(-n // f) for n, f in zip(sites.spatial_shape, factors, strict=True))
            return Sites(coords, stride, sites, is_sorted=True, spatial_shape=shape)

        return sites if stride == sites.stride else _get_or_make(self._sets, (sites, stride), make)

    def source_sites(self, sites: Sites, factors: Sequence[int]) -> Sites | None:
        """Return the sites from which layers have derived some sites, for a transposed layer.

        Parameters
        ----------
        sites : Sites
        factors : sequence of int
            Stride of the layer along each dimension.

        Returns
        -------
        Sites or None
            The nearest set with the finer stride, or None if no layer has derived the sites from such a set.

        Raises
        ------
        CoordinateError
            If the stride of the sites is not a multiple of the factors.
        """
        stride = _finer_stride(sites, factors)
        # Several strides may lie between the two layers of a skip connection.
        source = sites.source
        while source is not None and source.stride != stride:
            source = source.source
        return source

    def reached_sites(
        self, sites: Sites, factors: Sequence[int], offsets: Offsets, *, transposed: bool = False
    ) -> Sites:
        """Return all output sites whose windows hold some sites.

        Parameters
        ----------
        sites : Sites
        factors : sequence of int
            Stride of the layer along each dimension.
        offsets : tuple of tuple of int
            In cells of the finer set, as in :meth:`gather_needed`.
        transposed : bool
            True if the output sites are the finer ones. Otherwise they are coarser by the factors.

        Returns
        -------
        Sites
            Within the borders of the output if ``sites`` have borders, with as many positions as in torch's convolution
            whose padding is minus the lowest offset.

        Raises
        ------
        CoordinateError
            If the layer is transposed, and the stride of the sites is not a multiple of the factors.
        """
        along = zip(sites.stride, factors, strict=True)
        stride = _finer_stride(sites, factors) if transposed else tuple(s * f for s, f in along)

        def make() -> Sites:
            unit = stride if transposed else sites.stride
            steps = offsets if transposed else tuple(tuple(-o for o in offset) for offset in offsets)
            shape = _output_shape(sites.spatial_shape, factors, offsets, transposed=transposed)
            coords = reachable_sites(sites.coords, steps, unit)
            coords = coords[are_multiples(coords, stride)]
            if shape is not None:
                coords = coords[is_in_volume(coords, shape, stride)]
            # From inputs to outputs, the reverse of the direction of offset_bounds.
            coords = self.move_to_owners(coords, *offset_bounds(offsets, unit, transposed=not transposed))
            # A kernel with its centre reaches at least the sites themselves. If their number has not grown on any rank,
            # the set is the same, and is reused with its kernel maps.
            centred = (0,) * len(stride) in offsets and (stride, shape) == (sites.stride, sites.spatial_shape)
            if centred and all(self.gather_values(len(coords) == len(sites.coords))):
                return sites
            source = sites.source if transposed else sites
            return Sites(coords, stride, source, is_sorted=True, spatial_shape=shape)

        return _get_or_make(self._sets, (sites, stride, offsets, transposed), make)

    def union_of_sites(self, sets: Sequence[Sites]) -> Sites:
        """Return the sites that are in some of several sets, which have the same stride and borders.

        Parameters
        ----------
        sets : sequence of Sites

        Returns
        -------
        Sites
            Transposed layers return from it to the source of the first set.
        """

        def make() -> Sites:
            coords = unique_rows(torch.cat([sites.coords for sites in sets]))
            return replace(sets[0], coords=coords, is_sorted=True)

        return _get_or_make(self._sets, ("union", *sets), make)

    def gather_needed(
        self,
        features: torch.Tensor,
        inputs: Sites,
        outputs: Sites,
        offsets: Offsets,
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
            In cells of the finer set: input = output + offset.
        transposed : bool
            True for output = input + offset. Otherwise input = output + offset.

        Returns
        -------
        tuple of Tensor and KernelMap
        """
        # The finer set comes first in the key, so a transposed convolution finds the map of the opposite convolution.
        fine, coarse = (outputs, inputs) if transposed else (inputs, outputs)
        pairs = self._cached_map(
            (fine, coarse, offsets), lambda: kernel_map(fine.coords, coarse.coords, offsets, fine.stride, fine.order)
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

    def has_same_sites(self, one: Sites, other: Sites) -> bool:
        """Return True if two sets have the same sites in the same rows, on all ranks.

        Parameters
        ----------
        one, other : Sites

        Returns
        -------
        bool
        """
        # Ranks derive the same sets in the same order, so all of them send values or none does.
        return one is other or all(
            self.gather_values(one.stride == other.stride and torch.equal(one.coords, other.coords))
        )

    def replicate_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter, or another tensor that all ranks need, for work on the sites."""
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

    def has_same_owners(self, other: CoordinateManager) -> bool:
        """Return True if the same ranks own the sites of another manager's sets.

        Parameters
        ----------
        other : CoordinateManager

        Returns
        -------
        bool
        """
        return other is self or type(other) is CoordinateManager

    def split_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are split over the ranks of the sites, in blocks of any size.

        Parameters
        ----------
        rows : Tensor
            (M, C). For sites that are split over ranks a DistTensor, or a plain tensor that is identical on all ranks.

        Returns
        -------
        Tensor
        """
        return rows

    def at_owners(
        self,
        rows: torch.Tensor,
        site_of: Callable[[torch.Tensor], torch.Tensor],
        compute: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return values of rows, each computed on the rank that owns a site of the row.

        Parameters
        ----------
        rows : Tensor
            (M, C), the result of :meth:`split_rows`.
        site_of : callable
            Returns the site (M', 1 + D) of each of some rows (M', C).
        compute : callable
            Returns the values (M', C') of some rows (M', C), whose sites this rank owns. Every rank calls it.

        Returns
        -------
        Tensor
            (M, C').
        """
        return compute(rows)

    def dense_volume(
        self, features: torch.Tensor, cells: torch.Tensor, stride: Stride, origin: Sequence[int], size: Sequence[int]
    ) -> torch.Tensor:
        """Return the dense volume with features in some cells and zeros elsewhere.

        Parameters
        ----------
        features : Tensor
            Features (N, C) of all sites.
        cells : Tensor
            The cells (N, 1 + D) of this rank's sites, counted from ``origin``.
        stride : tuple of int
            Edge of a cell along each dimension.
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


def offset_bounds(offsets: Offsets, unit: Stride, *, transposed: bool = False) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest offset along each dimension.

    Parameters
    ----------
    offsets : tuple of tuple of int
    unit : tuple of int
        Factor of the offsets along each dimension, in cells of the finest grid.
    transposed : bool
        True if the offsets lead from inputs to outputs. Otherwise from outputs to inputs.

    Returns
    -------
    tuple of list and list
        From outputs to inputs, one entry for each spatial dimension.
    """
    along = list(zip(unit, zip(*offsets, strict=True), strict=True))
    low, high = [size * min(steps) for size, steps in along], [size * max(steps) for size, steps in along]
    return ([-h for h in high], [-v for v in low]) if transposed else (low, high)


def _finer_stride(sites: Sites, factors: Sequence[int]) -> Stride:
    """Return the stride of the sites divided by the stride of a transposed layer."""
    along = list(zip(sites.stride, factors, strict=True))
    if any(s % f for s, f in along):
        raise CoordinateError(
            f"a transposed convolution of stride {factors} needs sites whose stride it divides, not {sites.stride}: "
            f"give the SparseTensor coordinates in steps of {factors} and stride={factors}"
        )
    return tuple(s // f for s, f in along)


def _output_shape(
    shape: Sequence[int] | None, factors: Sequence[int], offsets: Offsets, *, transposed: bool
) -> tuple[int, ...] | None:
    """Return the number of output positions along each dimension; None if space has no borders."""
    if shape is None:
        return None
    # With padding p on both sides, the lowest offset is -p and the highest dilation x (kernel size - 1) - p.
    ends = [min(steps) + max(steps) for steps in zip(*offsets, strict=True)]
    along = list(zip(shape, factors, ends, strict=True))
    if transposed:
        return tuple(max(0, (n - 1) * f + end + 1) for n, f, end in along)
    return tuple(max(0, (n - end - 1) // f + 1) for n, f, end in along)


def _get_or_make(cache: dict[Hashable, Any], key: Hashable, make: Callable[[], Value]) -> Value:
    """Return the cached value of a key, which ``make`` returns at the first request."""
    if key not in cache:
        cache[key] = make()
    value: Value = cache[key]
    return value
