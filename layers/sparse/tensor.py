"""SparseTensor: coordinates of active sites, and their features.

Sites and kernel maps are stored in a coordinate manager, which also handles sites that are split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distconv.errors import CoordinateError, ShapeError
from distconv.kernels.sparse import check_coordinates
from distconv.kernels.sparse.coordinates import is_in_volume, stride_per_dim

from . import functions
from .coordinate_manager import CoordinateManager, Sites

_torch: Any = torch
"""torch without types: its functions accept objects with ``__torch_function__``, but are not typed so."""


class SparseTensor:
    """Features (N, C) of N active sites with integer coordinates (N, 1 + D), 1 <= D <= 4.

    torch modules that process each site, or all sites in the same way (linear, batch norm, activations, dropout, sums,
    ``torch.cat`` along channels) process its features. Other modules raise ``UnsupportedOperation``.

    Parameters
    ----------
    coords : Tensor
        Integers (N, 1 + D). The first column is the index of the sample, from 0. Rows keep their order. Sites of a
        coarser grid have coordinates in steps of the finest grid, which are multiples of ``stride``. Such a site stands
        for the cell whose lower corner it is. N may be 0.
    features : Tensor
        (N, C), on the same device.
    stride : int or sequence of int
        Edge of a cell, in cells of the finest grid: one number, or one for each dimension.
    batch_size : int, optional
        Number of samples, including those without sites (default: the highest index + 1).

    Raises
    ------
    CoordinateError
        If coordinates are not integers, repeat, have an invalid sample, are not multiples of the stride, or span too
        much.
    ShapeError
        If the features are not (N, C), or are on another device.
    """

    def __init__(
        self,
        coords: torch.Tensor,
        features: torch.Tensor,
        stride: int | Sequence[int] = 1,
        *,
        batch_size: int | None = None,
    ) -> None:
        coords = check_coordinates(coords, stride, batch_size)
        if batch_size is None:
            batch_size = int(coords[:, 0].max()) + 1 if len(coords) else 0
        self.coordinate_manager = CoordinateManager(batch_size)
        self.sites = Sites(coords, stride_per_dim(stride, coords.shape[1] - 1))
        self.features = self._check_features(features)
        _ = self.sites.order  # finds sites that occur twice

    @classmethod
    def on(cls, sites: Sites, manager: CoordinateManager, features: torch.Tensor) -> SparseTensor:
        """Return a tensor on sites of a manager.

        Parameters
        ----------
        sites : Sites
        manager : CoordinateManager
        features : Tensor
            (N, C).

        Returns
        -------
        SparseTensor
        """
        tensor = cls.__new__(cls)
        tensor.sites, tensor.coordinate_manager = sites, manager
        tensor.features = tensor._check_features(features)
        return tensor

    def replace(self, features: torch.Tensor) -> SparseTensor:
        """Return a tensor with the same sites and other features.

        Parameters
        ----------
        features : Tensor
            (N, C).

        Returns
        -------
        SparseTensor
        """
        return SparseTensor.on(self.sites, self.coordinate_manager, features)

    def with_spatial_shape(self, shape: int | Sequence[int] | None) -> SparseTensor:
        """Return the same sites and features in a space with borders.

        Layers with ``all_windows`` have outputs only within the borders, as dense layers and spconv have. Other layers
        keep the borders.

        Collective for a tensor that is split over ranks: call on every rank.

        Parameters
        ----------
        shape : int, sequence of int or None
            Number of cells of the tensor's stride along each dimension, from coordinate 0. None for no borders.

        Returns
        -------
        SparseTensor

        Raises
        ------
        CoordinateError
            If a site lies outside, or ``shape`` is not a positive integer for each dimension.
        """
        manager, coords = self.coordinate_manager, self.sites.coords
        if shape is not None:
            shape = (shape,) * self.dimension if isinstance(shape, int) else tuple(shape)
            if len(shape) != self.dimension or not all(isinstance(n, int) and n > 0 for n in shape):
                raise CoordinateError(f"spatial shape {shape}: pass a positive integer for each dimension")
            # Counts of all ranks, so that all raise the same error.
            outside = sum(manager.gather_values(int((~is_in_volume(coords, shape, self.sites.stride)).sum())))
            if outside:
                raise CoordinateError(
                    f"{outside} of {self.shape[0]} sites lie outside the spatial shape {shape} in cells of stride "
                    f"{self.stride}. Pass a larger shape, or shift the coordinates to begin at 0."
                )
        return SparseTensor.on(replace(self.sites, spatial_shape=shape), manager, self.features)

    def _check_features(self, features: torch.Tensor) -> torch.Tensor:
        rows = self.coordinate_manager.row_count(self.sites)
        if features.ndim != 2 or features.shape[0] != rows:
            raise ShapeError(f"features have shape {tuple(features.shape)}; {rows} sites require ({rows}, channels)")
        if features.device != self.sites.coords.device:
            raise ShapeError(f"features are on {features.device} and coordinates on {self.sites.coords.device}")
        return self.coordinate_manager.redistribute_features(features, self.sites)

    @property
    def coords(self) -> torch.Tensor:
        """Coordinates (N, 1 + D), with the index of the sample first.

        For a tensor that is split over ranks a DistTensor, whose rows are distributed as those of ``features``.
        ``sites.coords`` are the coordinates of this rank's sites.
        """
        return self.coordinate_manager.row_coords(self.sites)

    @property
    def stride(self) -> int | tuple[int, ...]:
        """Edge of a cell, in cells of the finest grid. One number, or one for each dimension if they differ."""
        return self.sites.stride[0] if len(set(self.sites.stride)) == 1 else self.sites.stride

    @property
    def spatial_shape(self) -> tuple[int, ...] | None:
        """Number of cells along each dimension, from coordinate 0; None if space has no borders."""
        return self.sites.spatial_shape

    @property
    def dimension(self) -> int:
        """Number of spatial dimensions."""
        return self.sites.coords.shape[1] - 1

    @property
    def batch_size(self) -> int:
        """Number of samples, including those without sites."""
        return self.coordinate_manager.batch_size

    @property
    def shape(self) -> torch.Size:
        """Shape (N, C) of the features."""
        return self.features.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features."""
        return self.features.dtype

    @property
    def device(self) -> torch.device:
        """Device of features and coordinates."""
        return self.features.device

    @property
    def nbytes(self) -> int:
        """Size of coordinates and features, and of a message with them, in bytes."""
        return self.sites.coords.nbytes + self.features.nbytes

    @property
    def requires_grad(self) -> bool:
        """True if the features require a gradient."""
        return self.features.requires_grad

    def dim(self) -> int:
        """Return 2, the number of dimensions of the features, which torch's modules check."""
        return 2

    def detach(self) -> SparseTensor:
        """Return a tensor with the same sites and detached features."""
        return self.replace(self.features.detach())

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """Return a tensor with features of another dtype, or on another device.

        On another device, kernel maps are computed again, and the finer sets of the sites are not kept. So a transposed
        convolution there does not find them.

        Parameters
        ----------
        *args, **kwargs
            As in ``torch.Tensor.to``.

        Returns
        -------
        SparseTensor
        """
        # `to` of the features parses torch's argument forms. Kernel maps are on the device of the coordinates.
        features = self.features.to(*args, **kwargs)
        if features.device == self.device:
            return self.replace(features)
        sites = replace(self.sites, coords=self.sites.coords.to(features.device), source=None)
        return SparseTensor.on(sites, CoordinateManager(self.batch_size), features)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> SparseTensor:
        """Call ``func`` on the features, on the same sites."""
        operands = list(args[0]) if func is torch.cat else list(args)
        sparse = [isinstance(x, SparseTensor) for x in operands]
        tensors = [x for x in operands if isinstance(x, SparseTensor)]
        if not tensors or any(isinstance(x, SparseTensor) for x in (kwargs or {}).values()):
            functions.raise_unsupported(func, "of a sparse tensor that is given by keyword or in a list")
        manager = tensors[0].coordinate_manager
        if not all([manager.has_same_sites(x.sites, tensors[0].sites) for x in tensors]):
            functions.raise_unsupported(func, "of sparse tensors on different sites (sum them with sparse.union)")
        features = [x.features if isinstance(x, SparseTensor) else x for x in operands]
        arguments = (features, *args[1:]) if func is torch.cat else features
        return tensors[0].replace(functions.call_on_features(func, sparse, arguments, kwargs or {}))

    def __add__(self, other: Any) -> Any:
        return _torch.add(self, other)

    def __sub__(self, other: Any) -> Any:
        return _torch.sub(self, other)

    def __mul__(self, other: Any) -> Any:
        return _torch.mul(self, other)

    def __truediv__(self, other: Any) -> Any:
        return _torch.div(self, other)

    def __neg__(self) -> Any:
        return _torch.neg(self)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Any:
        return _torch.rsub(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _torch.div(other, self)

    def __repr__(self) -> str:
        sites, channels = self.shape
        return (
            f"SparseTensor(sites={sites}, channels={channels}, dimension={self.dimension}, stride={self.stride}, "
            f"batch_size={self.batch_size}, dtype={self.dtype}, device={self.device})"
        )


@dataclass(frozen=True)
class _Origin:
    """The part of a SparseTensor that is not a leaf of its tree. Sites and manager are reused for equal coordinates."""

    stride: tuple[int, ...]
    spatial_shape: tuple[int, ...] | None
    batch_size: int
    sites: Sites = field(compare=False)
    manager: CoordinateManager = field(compare=False)


def _flatten(x: SparseTensor) -> tuple[list[Any], _Origin]:
    """Return coordinates and features as leaves, because both change from batch to batch."""
    return [x.sites.coords, x.features], _Origin(
        x.sites.stride, x.spatial_shape, x.batch_size, x.sites, x.coordinate_manager
    )


def _unflatten(leaves: Iterable[Any], origin: _Origin) -> SparseTensor:
    """Return a tensor from leaves without checks, because leaves of a tree may be any objects."""
    coords, features = leaves
    # The same coordinates keep their kernel maps; other coordinates must not find them.
    tensor = SparseTensor.__new__(SparseTensor)
    if coords is origin.sites.coords:
        tensor.sites, tensor.coordinate_manager = origin.sites, origin.manager
    else:
        tensor.sites = Sites(coords, origin.stride, spatial_shape=origin.spatial_shape)
        tensor.coordinate_manager = CoordinateManager(origin.batch_size)
    tensor.features = features
    return tensor


pytree.register_pytree_node(SparseTensor, _flatten, _unflatten, serialized_type_name="distconv.SparseTensor")
