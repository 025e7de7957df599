"""Sparse networks as pipeline stages: what crosses between stages are tensors, and samples are rows.

A micro-batch is some of the samples, so a pipeline is given a cloud as :func:`packed` makes it, a row for each sample.
Between stages go the coordinates, whose integers have no gradient, and the features: backwards only theirs travel.

::

    model = sparse_vgg16_bn()
    pipe = Pipeline(as_stages([model.features[:20], nn.Sequential(model.features[20:], model.pool, model.classifier)]),
                    comm, "1f1b-sno", F.cross_entropy, microbatches=4, optimizer=optimizer)
    pipe.step(packed(x), labels)

Source: Zhai et al. 2020 (SparsePipe), III-B (coordinates and features between stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distconv.errors import CoordinateError, UnsupportedOperation

from .tensor import SparseTensor

Boundary = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Coordinates (N, 1 + D), features (N, C), and stride and batch size."""


def packed(x: SparseTensor) -> torch.Tensor:
    """``x``, of stride 1, as one tensor (B, M, 1 + D + C) with a row for each sample: its sites, and padding.

    Each site is a 1, its coordinates and its features, in the features' dtype; padding is zeros. M is the largest
    number of sites of a sample.

    Raises
    ------
    CoordinateError
        If the dtype cannot hold a coordinate, or the stride is not 1.
    """
    space, limit = x.coords[:, 1:], 2 / torch.finfo(x.dtype).eps
    if x.stride != 1 or (len(space) and int(space.abs().max()) > limit):
        raise CoordinateError(
            f"packed: sites of stride 1 are needed, with coordinates up to {limit:.0f} in {x.dtype}, not {x!r}"
        )
    samples = x.coords[:, 0]
    counts = torch.bincount(samples, minlength=x.batch_size)
    order = samples.argsort(stable=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=x.device) - first[samples[order]]
    sites = torch.cat([torch.ones_like(x.features[:, :1]), space.to(x.dtype), x.features], 1)
    rows = sites.new_zeros(x.batch_size, int(counts.max()) if len(counts) else 0, sites.shape[1])
    return rows.index_put((samples[order], place), sites[order])


def unpacked(rows: torch.Tensor, dimension: int) -> SparseTensor:
    """The cloud that :func:`packed` made ``rows`` of, its sites by samples."""
    samples, places = (rows[..., 0] != 0).nonzero(as_tuple=True)
    sites = rows[samples, places]
    coords = torch.cat([samples[:, None], sites[:, 1 : 1 + dimension].long()], 1)
    return SparseTensor(coords, sites[:, 1 + dimension :], batch_size=len(rows))


class Stage(nn.Module):
    """``module`` between tensors: what :func:`packed` made if it is the ``first``, else what the stage before gives."""

    def __init__(self, module: nn.Module, dimension: int, *, first: bool) -> None:
        super().__init__()
        self.module, self.dimension, self.first = module, dimension, first

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The tensors of the module's result; a plain tensor as it is."""
        y = self.module(unpacked(tensors[0], self.dimension) if self.first else _joined(*tensors))
        return _parted(y) if isinstance(y, SparseTensor) else y


def as_stages(modules: Sequence[nn.Module], dimension: int = 3) -> list[nn.Module]:
    """``modules``, which work on sparse tensors one after the other, as the stages of a pipeline.

    Each must end in a sparse tensor or, the last, in a plain one. A transposed convolution does not find the finer
    sites of an earlier stage: keep what goes down and comes back up in one.

    Raises
    ------
    UnsupportedOperation
        When run, if a stage is given a plain tensor, which begins no sparse stage.
    """
    return [Stage(module, dimension, first=index == 0) for index, module in enumerate(modules)]


def _parted(x: SparseTensor) -> Boundary:
    return x.coords, x.features, torch.tensor([x.stride, x.batch_size], device=x.device)


def _joined(*tensors: torch.Tensor) -> SparseTensor:
    if len(tensors) != 3:
        raise UnsupportedOperation(f"a sparse stage takes coordinates, features and sizes, not {len(tensors)} tensors")
    coords, features, sizes = tensors
    stride, batch_size = sizes.tolist()
    return SparseTensor(coords, features, stride, batch_size=batch_size)
