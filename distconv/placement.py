"""Tensors on their way onto a grid and off it: scatter, gather, and blocks that ranks have already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distconv.communication import agreement, collectives
from distconv.communication.digest import digest
from distconv.communication.gpu import device_transport
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistributionError
from distconv.grid import ProcessGrid
from distconv.process import watchdog
from distconv.tensor import DistTensor

_FIRST, COMPARED_EVERY = 4, 7
"""Values are compared of the first tensors that are scattered over a grid, and of every so many: an odd number, so that
it is the turn of images and of labels, which take turns themselves."""

_SAMPLED = 1 << 16
"""Values of a tensor that are compared."""

_WAY_OUT = (
    "pass the same whole tensor on every rank (seed all ranks alike, the sampler and its shuffle, too), or let one "
    "rank give it, scatter(x, grid, root=0), or make it of blocks that ranks have, from_local(block, dist, shape)"
)


def _grid(target: ProcessGrid | Distribution) -> ProcessGrid:
    grid = target.grid if isinstance(target, Distribution) else target
    if not isinstance(grid, ProcessGrid):
        raise DistributionError(f"scatter needs a ProcessGrid or a Distribution, not {type(target).__name__}")
    return grid


def _distribution(target: ProcessGrid | Distribution, dims: Any, ndim: int) -> Distribution:
    return target if isinstance(target, Distribution) else Distribution(target, default_axes(dims, ndim))


def scatter(
    tensor: torch.Tensor | None,
    target: ProcessGrid | Distribution,
    dims: str | Sequence[str | None] | None = None,
    root: int | None = None,
) -> DistTensor:
    """The global ``tensor`` split over ``target``. Collective and differentiable (the adjoint gathers).

    Every rank passes the same whole tensor, or with ``root`` only that rank does. ``dims`` names each dimension's grid
    axis (``"nhw"`` for label maps); by default N, NC, NCW, NCHW or NCDHW. Grid axes it lacks hold replicas.

    The first few tensors on a grid, and then some, are compared: a digest of some of their values goes with that of
    their shapes. ``DISTCONV_CHECK`` chooses all, or none.

    Raises
    ------
    MismatchError
        If shape, dtype, device, requires_grad or values differ between ranks.
    DistributionError
        If ``dims`` does not fit the tensor, or what is passed is none.
    """
    if root is not None:
        return _scatter_from(root, tensor, target, dims)
    if isinstance(tensor, DistTensor):
        _grid(target)
        return tensor.redistribute(_distribution(target, dims, tensor.dim()))
    dist = _agreed(tensor, target, dims)
    assert tensor is not None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass such as MONAI's MetaTensor would see the calls of blocks.
        tensor = tensor.as_subclass(torch.Tensor)
    device_transport.choose_transport(dist.grid.world, tensor)
    local = collectives.redistribute(tensor, dist.replicate(), dist, tensor.shape).contiguous()
    # The block is never the caller's memory, whatever the grid: changing one must not change the other.
    own = local.clone() if local.data_ptr() == tensor.data_ptr() else local
    strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return DistTensor(own, dist, tensor.shape, strides)


def _agreed(tensor: torch.Tensor | None, target: ProcessGrid | Distribution, dims: Any) -> Distribution:
    """The distribution that all ranks give ``tensor``. What one rank alone finds wrong is compared, too."""
    grid = _grid(target)
    compares = _compares_values(grid)
    wrong: DistributionError | None = None
    try:
        if not isinstance(tensor, torch.Tensor):
            raise DistributionError(
                f"scatter needs a torch.Tensor on every rank, or root=; got {type(tensor).__name__}"
            )
        _check_memory("scatter", tensor.device.type)
        dist = _distribution(target, dims, tensor.dim())
        said = _described(tensor, dist) + _grad_mode() + (_values(tensor) if compares else "")
    except DistributionError as error:
        wrong, said = error, str(error)
    agreement.check_same_on_all_ranks(grid.world, "scatter", said, _WAY_OUT)
    if wrong is not None:
        raise wrong
    return dist


def _check_memory(call: str, device_type: str) -> None:
    if device_type == "meta":
        raise DistributionError(f"{call}: a tensor on the device meta has no values. Pass one on a device with memory.")


def _compares_values(grid: ProcessGrid) -> bool:
    """Whether it is the turn of a tensor that is scattered over ``grid``: one of the first, or every so many."""
    number = grid.scattered
    grid.scattered += 1
    if agreement.level == "off" or grid.size == 1:
        return False
    return agreement.level == "all" or number < _FIRST or number % COMPARED_EVERY == 0


def _values(tensor: torch.Tensor) -> str:
    try:
        return f", values {digest(_sampled(tensor)):014x}"
    except RuntimeError as error:  # on the meta device, sparse, ...
        return f", values that cannot be read ({error})"


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Up to ``_SAMPLED`` values, evenly spaced; an odd step goes through all columns."""
    flat = tensor.detach().reshape(-1)
    return flat[:: flat.numel() // _SAMPLED | 1]


def _described(tensor: torch.Tensor, dist: Distribution) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device.type}{grad}, {dist}"


def _grad_mode() -> str:
    """Words if gradients are off: a rank that evaluates alone would pair its messages with those of a training step."""
    return "" if torch.is_grad_enabled() else ", under no_grad"


def _scatter_from(root: int, tensor: torch.Tensor | None, target: ProcessGrid | Distribution, dims: Any) -> DistTensor:
    grid = _grid(target)
    agreement.check_same_on_all_ranks(grid.world, "scatter", f"root={root}{_grad_mode()}")
    if not 0 <= root < grid.size:
        raise DistributionError(f"scatter: root={root} is not one of the {grid.size} ranks")
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)
    with watchdog.waiting(lambda: f"scatter from rank {root}"):
        described = grid.world.bcast(mine, root=root)
    if described is None:
        raise DistributionError(f"scatter: rank {root} is the root and must pass a tensor")
    shape, dtype, requires_grad, device = described
    _check_memory("scatter", device)
    dist = _distribution(target, dims, len(shape))
    rows = shape or (1,)
    if grid.rank != root or tensor is None:
        tensor = torch.empty((0, *rows[1:]), dtype=dtype, device=device, requires_grad=requires_grad)
    elif not shape:
        tensor = tensor.reshape(1)
    device_transport.choose_transport(grid.world, tensor)
    # All rows on the root: an uneven distribution like any other.
    at_root = (0,) * (root + 1) + (rows[0],) * (grid.size - root)
    source = Distribution(grid.flat, ("n",) + (None,) * (len(rows) - 1), boundaries={"n": at_root})
    local = collectives.redistribute(tensor, source, dist if shape else Distribution(grid, (None,)), rows)
    return DistTensor(local.reshape(dist.local_shape(shape)).contiguous(), dist, shape)


def gather(tensor: DistTensor | torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank. Collective and differentiable (the adjoint slices)."""
    return tensor.gather() if isinstance(tensor, DistTensor) else tensor


def from_local(local: torch.Tensor, dist: Distribution, shape: Sequence[int]) -> DistTensor:
    """A global tensor of ``shape`` of which ``local`` is this rank's block under ``dist``. Collective.

    Raises
    ------
    MismatchError
        If shape, dtype, device or distribution differ between ranks.
    DistributionError
        On every rank, if a rank's block has the wrong shape.
    """
    grad = ", requires_grad" if local.requires_grad else ""
    agreement.check_same_on_all_ranks(
        dist.grid.world, "from_local", f"shape {tuple(shape)}, {local.dtype} on {local.device.type}{grad}, {dist}"
    )

    def check() -> None:
        _check_memory("from_local", local.device.type)
        if tuple(local.shape) != dist.local_shape(shape):
            raise DistributionError(
                f"from_local: the block is {tuple(local.shape)} but {dist} gives {dist.local_shape(shape)} of "
                f"{tuple(shape)}"
            )

    agreement.try_on_all_ranks(dist.grid.world, check, DistributionError)
    device_transport.choose_transport(dist.grid.world, local)
    return DistTensor(local.contiguous(), dist, shape)
