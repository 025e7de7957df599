"""SparseTensor: coordinates of active sites, and their features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distconv.errors import CoordinateError, ShapeError
from distconv.kernels.sparse import check_coordinates

from . import functions
from .coordinate_manager import CoordinateManager, Sites

_torch: Any = torch
"""Its functions take whatever has ``__torch_function__``, which their types do not say."""


class SparseTensor:
    """Features (N, C) of N active sites with integer coordinates (N, 1 + D), 1 <= D <= 4.

    The first column of ``coords`` is the index of the sample in the batch, from 0 on; rows keep their order. Sites of a
    coarser grid have coordinates in steps of the finest one, multiples of ``stride``, and stand for the cell whose
    lower corner they are. ``batch_size`` counts samples without sites too; left out, it is the highest index + 1.
    N may be 0.

    Ordinary torch modules that work on each site or on all sites alike (linear, batch norm, activations, dropout, sums,
    ``torch.cat`` along channels) take it as they take the features; others raise ``UnsupportedOperation``.

    Raises
    ------
    CoordinateError
        If coordinates are not integers, repeat, have no sample, are no multiples of the stride, or span too much.
    ShapeError
        If the features are not (N, C), or lie on another device.
    """

    def __init__(
        self, coords: torch.Tensor, features: torch.Tensor, stride: int = 1, *, batch_size: int | None = None
    ) -> None:
        if stride < 1:
            raise CoordinateError(f"stride={stride}: the stride of a sparse tensor is at least 1")
        coords = check_coordinates(coords, stride, batch_size)
        if batch_size is None:
            batch_size = int(coords[:, 0].max()) + 1 if len(coords) else 0
        self.coordinate_manager = CoordinateManager(batch_size)
        self.sites = Sites(coords, stride)
        self.features = self._checked(features)
        _ = self.sites.order  # finds sites that occur twice

    @classmethod
    def on(cls, sites: Sites, manager: CoordinateManager, features: torch.Tensor) -> SparseTensor:
        """A tensor on sites that a manager made."""
        tensor = cls.__new__(cls)
        tensor.sites, tensor.coordinate_manager = sites, manager
        tensor.features = tensor._checked(features)
        return tensor

    def replace(self, features: torch.Tensor) -> SparseTensor:
        """The same sites with other features (N, C)."""
        return SparseTensor.on(self.sites, self.coordinate_manager, features)

    def _checked(self, features: torch.Tensor) -> torch.Tensor:
        rows = self.coordinate_manager.rows(self.sites)
        if features.ndim != 2 or features.shape[0] != rows:
            raise ShapeError(f"features have shape {tuple(features.shape)}; {rows} sites need ({rows}, channels)")
        if features.device != self.sites.coords.device:
            raise ShapeError(f"features are on {features.device} and coordinates on {self.sites.coords.device}")
        return self.coordinate_manager.arranged(features, self.sites)

    @property
    def coords(self) -> torch.Tensor:
        """Coordinates (N, 1 + D), the index of the sample first.

        Of a tensor that is split over ranks a DistTensor, whose rows are distributed as those of ``features``.
        ``sites.coords`` are the coordinates of this rank's sites.
        """
        return self.coordinate_manager.coords(self.sites)

    @property
    def stride(self) -> int:
        """The edge of a cell, in cells of the finest grid."""
        return self.sites.stride

    @property
    def dimension(self) -> int:
        """The number of dimensions of space."""
        return self.sites.coords.shape[1] - 1

    @property
    def batch_size(self) -> int:
        """The number of samples, those without sites too."""
        return self.coordinate_manager.batch_size

    @property
    def shape(self) -> torch.Size:
        """That of the features, (N, C)."""
        return self.features.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the features."""
        return self.features.dtype

    @property
    def device(self) -> torch.device:
        """That of features and coordinates."""
        return self.features.device

    @property
    def nbytes(self) -> int:
        """Size of the coordinates and features, and of a message with them, in bytes."""
        return self.sites.coords.nbytes + self.features.nbytes

    @property
    def requires_grad(self) -> bool:
        """True if the features do."""
        return self.features.requires_grad

    def dim(self) -> int:
        """2: that of the features, which torch's modules ask for."""
        return 2

    def detach(self) -> SparseTensor:
        """The same sites, with features that need no gradient."""
        return self.replace(self.features.detach())

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """Features of another dtype, or all on another device; arguments as ``torch.Tensor.to``."""
        features = self.features.to(*args, **kwargs)
        if features.device == self.device:
            return self.replace(features)
        sites = Sites(self.sites.coords.to(features.device), self.stride)
        return SparseTensor.on(sites, CoordinateManager(self.batch_size), features)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> SparseTensor:
        """``func`` of the features, on the same sites."""
        operands = list(args[0]) if func is torch.cat else list(args)
        sparse = [isinstance(x, SparseTensor) for x in operands]
        tensors = [x for x in operands if isinstance(x, SparseTensor)]
        if not tensors or any(isinstance(x, SparseTensor) for x in (kwargs or {}).values()):
            functions.refuse(func, "of a sparse tensor that is given by keyword or in a list")
        if not all(x.sites.same_as(tensors[0].sites) for x in tensors):
            functions.refuse(func, "of sparse tensors on different sites")
        features = [x.features if isinstance(x, SparseTensor) else x for x in operands]
        arguments = (features, *args[1:]) if func is torch.cat else features
        return tensors[0].replace(functions.on_features(func, sparse, arguments, kwargs or {}))

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
    """What a SparseTensor has beside its leaves. Sites and manager are kept while the coordinates stay the same."""

    stride: int
    batch_size: int
    sites: Sites = field(compare=False)
    manager: CoordinateManager = field(compare=False)


def _flatten(x: SparseTensor) -> tuple[list[Any], _Origin]:
    """Coordinates and features are leaves: both change from batch to batch."""
    return [x.sites.coords, x.features], _Origin(x.stride, x.batch_size, x.sites, x.coordinate_manager)


def _unflatten(leaves: Iterable[Any], origin: _Origin) -> SparseTensor:
    """Without checks: leaves may be anything, as in every tree."""
    coords, features = leaves
    tensor = SparseTensor.__new__(SparseTensor)
    if coords is origin.sites.coords:
        tensor.sites, tensor.coordinate_manager = origin.sites, origin.manager
    else:
        tensor.sites, tensor.coordinate_manager = Sites(coords, origin.stride), CoordinateManager(origin.batch_size)
    tensor.features = features
    return tensor


pytree.register_pytree_node(SparseTensor, _flatten, _unflatten, serialized_type_name="distconv.SparseTensor")
