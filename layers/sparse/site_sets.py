"""Pruning and union of sites, and features of samples at their sites.

Other combinations need no function: ``torch.cat([x, y], 1)`` and arithmetic for tensors on the same sites, and
``x.replace(f(x.features))`` for a function of each site.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from distconv.errors import DistributionError, ShapeError
from distconv.kernels.sparse import sparse_sum_pool

from .tensor import SparseTensor
from .windows import check_input


def prune(x: SparseTensor, keep: torch.Tensor) -> SparseTensor:
    """Return the sites of a mask, with their features.

    Differentiable in the features. Collective for a tensor that is split over ranks: call on every rank.

    Parameters
    ----------
    x : SparseTensor
        N sites.
    keep : Tensor
        Booleans (N,), True for the sites to keep. For a split tensor a DistTensor, such as ``x.features[:, 0] > 0``.

    Returns
    -------
    SparseTensor
        Transposed layers return from it to the same sites as from ``x``.

    Raises
    ------
    ShapeError
        If ``keep`` is not a boolean for each site.
    """
    check_input(x)
    if keep.dtype != torch.bool or keep.shape != x.shape[:1]:
        raise ShapeError(
            f"prune: keep is {keep.dtype} of shape {tuple(keep.shape)}. Pass booleans ({x.shape[0]},), one for each "
            "site."
        )
    manager = x.coordinate_manager
    mask = manager.local_rows(x.replace(keep[:, None]).features)[:, 0]
    sites = replace(x.sites, coords=x.sites.coords[mask])
    return SparseTensor.on(sites, manager, manager.wrap_features(manager.local_rows(x.features)[mask], sites))


def union(*tensors: SparseTensor) -> SparseTensor:
    """Return the sum of sparse tensors on all of their sites; a tensor counts as zero where it has no site.

    Differentiable. Collective for tensors that are split over ranks: call on every rank.

    Parameters
    ----------
    *tensors : SparseTensor
        With the same stride, spatial shape, batch size and channels, and split by the same partition.

    Returns
    -------
    SparseTensor
        With sorted sites. Transposed layers return from it to the same sites as from the first tensor.

    Raises
    ------
    ShapeError
        If the tensors differ in these, or there are none.
    DistributionError
        If the tensors are not split by the same partition.
    """
    for x in tensors:
        check_input(x)
    kinds = {
        f"channels={x.shape[1]}, stride={x.stride}, dimension={x.dimension}, batch_size={x.batch_size}, "
        f"spatial_shape={x.spatial_shape}": None
        for x in tensors
    }
    if len(kinds) != 1:
        raise ShapeError(f"union: sparse tensors of one kind are required, not {len(kinds)} ({'; '.join(kinds)}).")
    manager = tensors[0].coordinate_manager
    if not all(manager.has_same_owners(x.coordinate_manager) for x in tensors):
        raise DistributionError("union: the tensors are split by different partitions. Scatter them with the same one.")
    sites = manager.union_of_sites([x.sites for x in tensors])
    here = ((0,) * tensors[0].dimension,)
    parts = [sparse_sum_pool(*manager.gather_needed(x.features, x.sites, sites, here)) for x in tensors]
    return SparseTensor.on(sites, manager, manager.wrap_features(sum(parts[1:], parts[0]), sites))


def broadcast_to_sites(values: torch.Tensor, x: SparseTensor) -> SparseTensor:
    """Return the values of each sample at all of its sites.

    Differentiable. Collective for a tensor that is split over ranks: call on every rank. Values that are added,
    multiplied or concatenated are ``x + broadcast_to_sites(values, x)``, ``x * broadcast_to_sites(values, x)`` and
    ``torch.cat([x, broadcast_to_sites(values, x)], 1)``.

    Parameters
    ----------
    values : Tensor
        (B, C), such as the result of ``SparseGlobalPool``. For a split tensor, a plain tensor is identical on all
        ranks.
    x : SparseTensor
        The sites; its features are not used.

    Returns
    -------
    SparseTensor
        On the sites of ``x``.

    Raises
    ------
    ShapeError
        If there is not a row of values for each sample.
    """
    check_input(x)
    if values.ndim != 2 or len(values) != x.batch_size:
        raise ShapeError(
            f"broadcast_to_sites: values have shape {tuple(values.shape)}. Pass ({x.batch_size}, channels), one row "
            "for each sample."
        )
    manager = x.coordinate_manager
    rows = manager.replicate_parameter(values)[x.sites.coords[:, 0]]
    return SparseTensor.on(x.sites, manager, manager.wrap_features(rows, x.sites))
