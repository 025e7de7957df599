"""Sets of sites and the kernel maps between them, for all tensors that descend from one another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from distconv.errors import CoordinateError
from distconv.kernels.sparse import KernelMap, coarsen, kernel_map, reachable_sites, sorting_order
from distconv.kernels.sparse.coordinates import Offsets

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Sites:
    """A set of active sites: coordinates (N, 1 + D), multiples of ``stride``, in steps of the finest grid.

    ``finer`` is the set of which these are the coarse cells; ``is_sorted`` that rows are known to be in order.
    """

    coords: torch.Tensor
    stride: int
    finer: Sites | None = None
    is_sorted: bool = False

    @cached_property
    def order(self) -> torch.Tensor | None:
        """What sorts the rows; None if they are sorted."""
        return None if self.is_sorted else sorting_order(self.coords)

    def same_as(self, other: Sites) -> bool:
        """Return True if both have the same sites in the same rows."""
        return self is other or (self.stride == other.stride and torch.equal(self.coords, other.coords))


class CoordinateManager:
    """The sets of sites that layers made from one another, and kernel maps, each made once.

    Tensors that descend from one another share it; it lives as long as they do. A map serves the forward and backward
    pass of all layers with the same kernel, and the transposed convolution that goes back. ``hits`` and ``misses``
    count the kernel maps asked for, ``bytes`` is the memory of those held.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.hits = self.misses = 0
        self._maps: dict[Hashable, KernelMap] = {}
        self._sets: dict[Hashable, Sites] = {}

    def coarser(self, sites: Sites, factor: int) -> Sites:
        """The cells ``factor`` times as large that hold ``sites``; themselves for a factor of 1."""
        stride = sites.stride * factor

        def make() -> Sites:
            dimensions = sites.coords.shape[1] - 1
            coords = self.settled(coarsen(sites.coords, stride), (1 - stride,) * dimensions, (0,) * dimensions)
            return Sites(coords, stride, sites, is_sorted=True)

        return sites if factor == 1 else _once(self._sets, (sites, factor), make)

    def finer(self, sites: Sites, factor: int, offsets: Offsets, dilation: int) -> Sites:
        """The sites that ``sites`` are the cells of, ``factor`` times as large, or else all that a kernel reaches.

        Raises
        ------
        CoordinateError
            If the stride of the sites is no multiple of the factor.
        """
        if sites.stride % factor:
            raise CoordinateError(
                f"a transposed convolution of stride {factor} needs sites whose stride it divides, not {sites.stride}: "
                f"give the SparseTensor coordinates in steps of {factor} and stride={factor}"
            )
        stride = sites.stride // factor
        finer = sites.finer
        while finer is not None and finer.stride > stride:
            finer = finer.finer
        if finer is not None and finer.stride == stride:
            return finer
        return self._all_reached(sites, stride, offsets, dilation)

    def wider(self, sites: Sites, offsets: Offsets, dilation: int) -> Sites:
        """All sites of the same stride that a kernel reaches from ``sites``."""
        return self._all_reached(sites, sites.stride, offsets, dilation)

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
        """Features, and the map from their rows to those of ``outputs``, with input = output + offset.

        Offsets are in steps of ``dilation`` fine cells; ``transposed``, output = input + offset.
        """
        fine, coarse = (outputs, inputs) if transposed else (inputs, outputs)
        unit = fine.stride * dilation
        pairs = self._mapped(
            (fine, coarse, offsets, dilation),
            lambda: kernel_map(fine.coords, coarse.coords, offsets, unit, fine.order),
        )
        return features, pairs.transposed() if transposed else pairs

    @property
    def bytes(self) -> int:
        """Memory of the kernel maps that are held."""
        return sum(pairs.bytes for pairs in self._maps.values())

    def _mapped(self, key: Hashable, make: Callable[[], KernelMap]) -> KernelMap:
        if key in self._maps:
            self.hits += 1
            return self._maps[key]
        mapping = make()
        self.misses += 1
        self._maps[key] = mapping
        return mapping

    def _all_reached(self, sites: Sites, stride: int, offsets: Offsets, dilation: int) -> Sites:
        def make() -> Sites:
            unit = stride * dilation
            coords = self.settled(reachable_sites(sites.coords, offsets, unit), *reach(offsets, unit))
            centred = (0,) * (coords.shape[1] - 1) in offsets and stride == sites.stride
            if centred and all(self.all_ranks(len(coords) == len(sites.coords))):
                return sites
            return Sites(coords, stride, sites.finer, is_sorted=True)

        return _once(self._sets, (sites, stride, offsets, dilation), make)

    # -- what differs where sites are split over ranks ----------------------------------------------------------------

    def rows(self, sites: Sites) -> int:
        """How many rows features of ``sites`` have."""
        return len(sites.coords)

    def arranged(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """``features`` of all of ``sites``, each row where its site is."""
        return features

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter as it enters work on the sites."""
        return tensor

    def local(self, features: torch.Tensor) -> torch.Tensor:
        """The rows of ``features`` that belong to the coordinates."""
        return features

    def result(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Features of ``sites``, given those that were computed here."""
        return features

    def settled(self, coords: torch.Tensor, low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
        """``coords``, made from sites between ``low`` and ``high`` away, on the ranks that own them."""
        return coords

    def coords(self, sites: Sites) -> torch.Tensor:
        """Coordinates (N, 1 + D) in the rows of features."""
        return sites.coords

    def all_ranks(self, value: Made) -> list[Made]:
        """``value`` of each rank that has some of the sites."""
        return [value]

    def volume(
        self, features: torch.Tensor, cells: torch.Tensor, stride: int, origin: Sequence[int], size: Sequence[int]
    ) -> torch.Tensor:
        """The dense volume (B, C, *size) with ``features`` in ``cells`` (N, 1 + D) of this rank and zeros elsewhere.

        The cells have the edge ``stride`` and begin at ``origin``.
        """
        return scattered(features, cells, (self.batch_size, *size))

    def population(self, sites: Sites) -> torch.Tensor:
        """Sites of each sample, (B,)."""
        return torch.bincount(sites.coords[:, 0], minlength=self.batch_size)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of samples (B, C) from those of the sites that are here."""
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Maxima of samples (B, C) from those of the sites that are here."""
        return values


def scattered(features: torch.Tensor, cells: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the volume (B, C, ...) of ``size`` (B, ...) with ``features`` (N, C) in ``cells`` (N, 1 + D)."""
    volume = features.new_zeros(*size, features.shape[1])
    return volume.index_put(cells.unbind(1), features).movedim(-1, 1).contiguous()


def reach(offsets: Offsets, unit: int, *, transposed: bool = False) -> tuple[list[int], list[int]]:
    """The lowest and the highest of ``offsets`` along each dimension, in steps of ``unit``; from outputs to inputs."""
    along = list(zip(*offsets, strict=True))
    low, high = [unit * min(steps) for steps in along], [unit * max(steps) for steps in along]
    return ([-h for h in high], [-v for v in low]) if transposed else (low, high)


def _once(cache: dict[Hashable, Any], key: Hashable, make: Callable[[], Made]) -> Made:
    if key not in cache:
        cache[key] = make()
    value: Made = cache[key]
    return value
