"""Sparse networks as pipeline stages: what crosses between stages are tensors, and samples are rows.

A micro-batch is some of the samples, so a pipeline is given a cloud as :func:`packed` makes it, a row for each sample.
Between stages go the coordinates, whose integers have no gradient, the features, and stride and batch size: backwards
only the features' gradients travel.

::

    model = sparse_vgg16_bn()
    pipe = Pipeline(as_stages([model.features[:20], nn.Sequential(model.features[20:], model.pool, model.classifier)]),
                    comm, "1f1b-sno", F.cross_entropy, microbatches=4, optimizer=optimizer)
    pipe.step(packed(x), labels)

Source: Zhai et al. 2020 (SparsePipe), III-B (coordinates and features between stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from distconv.errors import CoordinateError

from .coordinate_manager import CoordinateManager, Sites
from .tensor import SparseTensor


def packed(x: SparseTensor) -> torch.Tensor:
    """``x``, of stride 1, as one tensor (B, M, 1 + D + C) with a row for each sample: its sites, and padding.

    Each site is a 1, its coordinates and its features, in the features' dtype; padding is zeros. M is the largest
    number of sites of a sample. Sites are sorted here once, and stay so in all stages.

    Raises
    ------
    CoordinateError
        If the dtype cannot hold a coordinate, or the stride is not 1.
    """
    space, limit = x.sites.coords[:, 1:], 2 / torch.finfo(x.dtype).eps
    if x.stride != 1 or (len(space) and int(space.abs().max()) > limit):
        raise CoordinateError(
            f"packed: sites of stride 1 are needed, with coordinates up to {limit:.0f} in {x.dtype}, not {x!r}"
        )
    x = _in_order(x)
    samples = x.sites.coords[:, 0]
    counts = torch.bincount(samples, minlength=x.batch_size)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(samples), device=x.device) - first[samples]
    sites = torch.cat([torch.ones_like(x.features[:, :1]), x.sites.coords[:, 1:].to(x.dtype), x.features], 1)
    rows = sites.new_zeros(x.batch_size, int(counts.max()) if len(counts) else 0, sites.shape[1])
    return rows.index_put((samples, place), sites)


def unpacked(rows: torch.Tensor, dimension: int) -> SparseTensor:
    """The cloud that :func:`packed` made ``rows`` of, its sites sorted."""
    samples, places = (rows[..., 0] != 0).nonzero(as_tuple=True)
    sites = rows[samples, places]
    coords = torch.cat([samples[:, None], sites[:, 1 : 1 + dimension].long()], 1)
    return _trusted(coords, sites[:, 1 + dimension :], 1, len(rows))


class SparseStage(nn.Module):
    """``module`` between tensors: what :func:`packed` made if it is the ``first``, else what the stage before gives."""

    def __init__(self, module: nn.Module, dimension: int, *, first: bool) -> None:
        super().__init__()
        self.module, self.dimension, self.first = module, dimension, first

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The tensors of the module's results, of which plain ones stay as they are."""
        given = [unpacked(tensors[0], self.dimension)] if self.first else _joined(tensors)
        y = self.module(*given)
        parted = tuple(_parted(y if isinstance(y, tuple) else (y,)))
        return parted if len(parted) > 1 else parted[0]


def as_stages(modules: Sequence[nn.Module], dimension: int = 3) -> list[nn.Module]:
    """``modules``, which work on sparse tensors one after the other, as the stages of a pipeline.

    Each takes what the one before returns: a sparse tensor, a plain one of floating point, or a tuple of both, as
    ``distconv.pipeline.split`` makes them. A transposed convolution does not find the finer sites of an earlier stage:
    keep what goes down and comes back up in one.
    """
    return [SparseStage(module, dimension, first=index == 0) for index, module in enumerate(modules)]


def _parted(values: Iterable[SparseTensor | torch.Tensor]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, SparseTensor):
            x = _in_order(value)
            yield from (x.sites.coords, x.features, torch.tensor([x.stride, x.batch_size], device=x.device))
        else:
            yield value


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[SparseTensor | torch.Tensor]:
    """Integers are the coordinates of a sparse tensor, whose features and sizes follow."""
    left = iter(tensors)
    for tensor in left:
        if tensor.is_floating_point():
            yield tensor
        else:
            features, sizes = next(left), next(left)
            yield _trusted(tensor, features, *sizes.tolist())


def _in_order(x: SparseTensor) -> SparseTensor:
    order = x.sites.order
    return x if order is None else _trusted(x.sites.coords[order], x.features[order], x.stride, x.batch_size)


def _trusted(coords: torch.Tensor, features: torch.Tensor, stride: int, batch_size: int) -> SparseTensor:
    """A tensor on sorted sites that were checked where they came from."""
    return SparseTensor.on(Sites(coords, stride, is_sorted=True), CoordinateManager(batch_size), features)
