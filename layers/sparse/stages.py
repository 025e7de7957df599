"""Sparse networks as pipeline stages.

A pipeline divides a mini-batch by rows and sends plain tensors between stages. So its input is a cloud packed by
:func:`packed`, with a row for each sample. Stages send coordinates, which are integers without a gradient, then
features, and then batch size, stride and spatial shape. In backward only the gradients of features are sent.

::

    model = sparse_vgg16_bn()
    pipe = Pipeline(as_stages([model.features[:20], nn.Sequential(model.features[20:], model.pool, model.classifier)]),
                    comm, "1f1b-sno", F.cross_entropy, microbatches=4, optimizer=optimizer)
    pipe.step(packed(x), labels)

Source: Zhai et al. 2020 (SparsePipe), III-B (coordinates and features between stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distconv.errors import CoordinateError

from .coordinate_manager import CoordinateManager, Sites
from .tensor import SparseTensor


def packed(x: SparseTensor) -> torch.Tensor:
    """Return a sparse tensor as one plain tensor with a row for each sample.

    Parameters
    ----------
    x : SparseTensor
        Its stride is 1, and it has no spatial shape.

    Returns
    -------
    Tensor
        (B, M, 1 + D + C), with the dtype of the features. M is the largest number of sites of a sample. A site is a 1,
        its coordinates and its features; padding is zeros. Sites are sorted, and stay sorted in all stages.

    Raises
    ------
    CoordinateError
        If the dtype cannot represent a coordinate, the stride is not 1, or there is a spatial shape.
    """
    # Up to 2 / eps a dtype represents all integers.
    space, limit = x.sites.coords[:, 1:], 2 / torch.finfo(x.dtype).eps
    if x.stride != 1 or x.spatial_shape is not None or (len(space) and int(space.abs().max()) > limit):
        raise CoordinateError(
            f"packed: sites must have stride 1 and no spatial shape, and coordinates up to {limit:.0f} in {x.dtype} "
            f"({x!r})"
        )
    x = _sort_sites(x)
    samples = x.sites.coords[:, 0]
    counts = torch.bincount(samples, minlength=x.batch_size)
    # Sorted sites are grouped by sample: the position of a site is its row minus the first row of its sample.
    first = counts.cumsum(0) - counts
    position = torch.arange(len(samples), device=x.device) - first[samples]
    sites = torch.cat([torch.ones_like(x.features[:, :1]), x.sites.coords[:, 1:].to(x.dtype), x.features], 1)
    rows = sites.new_zeros(x.batch_size, int(counts.max()) if len(counts) else 0, sites.shape[1])
    return rows.index_put((samples, position), sites)


def unpacked(rows: torch.Tensor, dimension: int) -> SparseTensor:
    """Return the sparse tensor that was packed, with sorted sites.

    Parameters
    ----------
    rows : Tensor
        Result of :func:`packed`, or some of its rows.
    dimension : int
        Number of spatial dimensions D.

    Returns
    -------
    SparseTensor
    """
    samples, positions = (rows[..., 0] != 0).nonzero(as_tuple=True)
    sites = rows[samples, positions]
    coords = torch.cat([samples[:, None], sites[:, 1 : 1 + dimension].long()], 1)
    return _from_checked(Sites(coords, (1,) * dimension, is_sorted=True), sites[:, 1 + dimension :], len(rows))


class SparseStage(nn.Module):
    """A module of sparse tensors as a stage, with plain tensors as input and output.

    Parameters
    ----------
    module : nn.Module
        Takes and returns sparse tensors, plain ones of floating point, or tuples of both.
    dimension : int
        Number of spatial dimensions.
    first : bool
        True if the input is the result of :func:`packed`. Otherwise it is the output of another stage.
    """

    def __init__(self, module: nn.Module, dimension: int, *, first: bool) -> None:
        super().__init__()
        self.module, self.dimension, self.first = module, dimension, first

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the plain tensors of the module's results.

        Parameters
        ----------
        *tensors : Tensor
            Output of the stage before, or one packed tensor.

        Returns
        -------
        Tensor or tuple of Tensor
        """
        inputs = [unpacked(tensors[0], self.dimension)] if self.first else _unflatten_values(tensors)
        y = self.module(*inputs)
        outputs = tuple(_flatten_values(y if isinstance(y, tuple) else (y,)))
        return outputs if len(outputs) > 1 else outputs[0]


def as_stages(modules: Sequence[nn.Module], dimension: int = 3) -> list[nn.Module]:
    """Return modules of sparse tensors as the stages of a pipeline.

    A transposed convolution does not find the finer sites of an earlier stage. Keep layers that reduce the resolution
    and the transposed layers that restore it in one stage.

    Parameters
    ----------
    modules : sequence of nn.Module
        Each takes what the one before returns: a sparse tensor, a plain one of floating point, or a tuple of both, as
        ``distconv.pipeline.split`` returns them.
    dimension : int
        Number of spatial dimensions.

    Returns
    -------
    list of nn.Module
    """
    return [SparseStage(module, dimension, first=index == 0) for index, module in enumerate(modules)]


def _flatten_values(values: Iterable[SparseTensor | torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of values: three for each sparse tensor."""
    for value in values:
        if isinstance(value, SparseTensor):
            # The receiver assumes sorted sites, and does not sort them again.
            x = _sort_sites(value)
            sizes = [x.batch_size, *x.sites.stride, *(x.spatial_shape or ())]
            yield from (x.sites.coords, x.features, torch.tensor(sizes, device=x.device))
        else:
            yield value


def _unflatten_values(tensors: Iterable[torch.Tensor]) -> Iterator[SparseTensor | torch.Tensor]:
    """Yield the values of plain tensors: integers are the coordinates of a sparse tensor, features and sizes follow."""
    left = iter(tensors)
    for tensor in left:
        if tensor.is_floating_point():
            yield tensor
        else:
            features, (batch_size, *sizes) = next(left), next(left).tolist()
            dimension = tensor.shape[1] - 1
            stride, shape = tuple(sizes[:dimension]), tuple(sizes[dimension:]) or None
            yield _from_checked(Sites(tensor, stride, is_sorted=True, spatial_shape=shape), features, batch_size)


def _sort_sites(x: SparseTensor) -> SparseTensor:
    """Return ``x`` with its sites sorted."""
    order = x.sites.order
    if order is None:
        return x
    sites = replace(x.sites, coords=x.sites.coords[order], source=None, is_sorted=True)
    return _from_checked(sites, x.features[order], x.batch_size)


def _from_checked(sites: Sites, features: torch.Tensor, batch_size: int) -> SparseTensor:
    """Return a tensor on sites that another stage has checked."""
    return SparseTensor.on(sites, CoordinateManager(batch_size), features)
