"""Scatter and gather: tensors enter and leave a process grid.

``scatter`` takes a full tensor, identical on all ranks or of one rank; ``from_local`` takes blocks that ranks already
have; ``gather`` returns the full tensor. The public functions check that ranks agree before any data is sent.
"""

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
from distconv.memory_format import dense
from distconv.process import watchdog
from distconv.tensor import DistTensor

_COMPARED_FIRST, COMPARED_EVERY = 4, 7
"""Values of the first four tensors that are scattered over a grid are compared, and of every seventh after that.

The period is odd, so that images and labels, which usually alternate, are both compared.
"""

_SAMPLED = 1 << 16
"""Maximum number of values of a tensor that are compared."""

_SUGGESTED_FIX = (
    "pass the same full tensor on every rank (use the same seed on all ranks, also for the sampler), or pass it on one "
    "rank with scatter(x, grid, root=0), or distribute existing blocks with from_local(block, dist, shape)"
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
    """Distribute a full tensor over a process grid.

    Collective: call on every rank. Differentiable: the backward pass gathers the gradient.

    Parameters
    ----------
    tensor : Tensor or None
        The full (global) tensor, identical on all ranks. With ``root``, the other ranks may pass ``None``. A DistTensor
        is redistributed.
    target : ProcessGrid or Distribution
        The grid, or the complete distribution.
    dims : str or sequence of str or None, optional
        The grid axis that splits each dimension, such as ``"nhw"`` for label maps; ``-`` or ``None`` for a dimension
        that is not split. By default dimensions are N, NC, NCW, NCHW or NCDHW. The tensor is replicated along grid axes
        that are left out. Ignored if ``target`` is a distribution.
    root : int, optional
        Rank that has the tensor. By default every rank passes it.

    Returns
    -------
    DistTensor
        The distributed tensor. Its block never shares memory with ``tensor``.

    Raises
    ------
    MismatchError
        On every rank, if shape, dtype, device type, ``requires_grad``, gradient mode or values differ between ranks.
    DistributionError
        On every rank, if ``dims`` does not fit the tensor, ``tensor`` is not a tensor with values, ``target`` is not a
        grid or a distribution, or ``root`` is not a rank.

    Notes
    -----
    Without ``root``, distconv compares a digest of up to 65536 values of the first four tensors on a grid, and of every
    seventh after that. ``DISTCONV_CHECK=all`` compares every tensor, and ``off`` none.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> grid = dc.ProcessGrid(h=1)  # h=2 on two ranks
    >>> x = dc.scatter(torch.zeros(2, 3, 8, 8), grid)
    >>> x.shape, x.local.shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 3, 8, 8]))
    >>> labels = dc.scatter(torch.zeros(2, 8, 8), grid, dims="nhw")
    """
    if root is not None:
        return _scatter_from(root, tensor, target, dims)
    if isinstance(tensor, DistTensor):
        _grid(target)
        return tensor.redistribute(_distribution(target, dims, tensor.dim()))
    dist = _check_and_distribute(tensor, target, dims)
    assert tensor is not None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass such as MONAI's MetaTensor would intercept the calls on blocks.
        tensor = tensor.as_subclass(torch.Tensor)
    # Collective at its first use, and messages do not choose. So it comes before the redistribution.
    device_transport.choose_transport(dist.grid.world, tensor)
    local = dense(collectives.redistribute(tensor, dist.replicate(), dist, tensor.shape))
    # The block never shares the caller's memory, on any grid: modifying one must not modify the other.
    own = local.clone() if local.data_ptr() == tensor.data_ptr() else local
    strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return DistTensor(own, dist, tensor.shape, strides)


def _check_and_distribute(tensor: torch.Tensor | None, target: ProcessGrid | Distribution, dims: Any) -> Distribution:
    """Return the distribution of ``tensor`` after checking that all ranks pass the same tensor.

    An error of one rank alone is compared as a value, so that all ranks reach the comparison and raise. Collective.
    """
    grid = _grid(target)
    compares = _count_and_select(grid)
    failure: DistributionError | None = None
    # Not raised yet: the other ranks wait in the comparison, which makes it an error on all of them.
    try:
        if not isinstance(tensor, torch.Tensor):
            raise DistributionError(
                f"scatter needs a torch.Tensor on every rank, or root=; got {type(tensor).__name__}"
            )
        _check_memory("scatter", tensor.device.type)
        dist = _distribution(target, dims, tensor.dim())
        # The distribution is compared, too: with another one a rank would send messages that no rank receives.
        description = _describe(tensor, dist) + _describe_grad_mode() + (_digest_of_values(tensor) if compares else "")
    except DistributionError as error:
        failure, description = error, str(error)
    agreement.check_same_on_all_ranks(grid.world, "scatter", description, _SUGGESTED_FIX)
    if failure is not None:
        raise failure
    return dist


def _check_memory(call: str, device_type: str) -> None:
    if device_type == "meta":
        raise DistributionError(f"{call}: a tensor on the device meta has no values. Pass one on a device with memory.")


def _count_and_select(grid: ProcessGrid) -> bool:
    """Return True if the values of the next tensor that is scattered over ``grid`` are compared; count the tensor."""
    # Counted in any case, so that all ranks compare the same tensors.
    number = grid.scatter_count
    grid.scatter_count += 1
    if agreement.level == "off" or grid.size == 1:
        return False
    return agreement.level == "all" or number < _COMPARED_FIRST or number % COMPARED_EVERY == 0


def _digest_of_values(tensor: torch.Tensor) -> str:
    try:
        flat = tensor.detach().reshape(-1)
        # Evenly spaced. An even step would visit only some columns of a matrix with an even number of columns.
        return f", values {digest(flat[:: flat.numel() // _SAMPLED | 1]):014x}"
    except RuntimeError as error:  # sparse, nested, ...
        return f", values that cannot be read ({error})"


def _describe(tensor: torch.Tensor, dist: Distribution) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device.type}{grad}, {dist}"


def _describe_grad_mode() -> str:
    """Describe a disabled gradient mode: a rank that evaluates would exchange messages with ranks that train."""
    return "" if torch.is_grad_enabled() else ", under no_grad"


def _scatter_from(root: int, tensor: torch.Tensor | None, target: ProcessGrid | Distribution, dims: Any) -> DistTensor:
    grid = _grid(target)
    agreement.check_same_on_all_ranks(grid.world, "scatter", f"root={root}{_describe_grad_mode()}")
    if not 0 <= root < grid.size:
        raise DistributionError(f"scatter: root={root} is not one of the {grid.size} ranks")
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)
    with watchdog.waiting(lambda: f"scatter from rank {root}"):
        description = grid.world.bcast(mine, root=root)
    # Received from the root, so all ranks raise, or none does.
    if description is None:
        raise DistributionError(f"scatter: rank {root} is the root and must pass a tensor")
    shape, dtype, requires_grad, device = description
    _check_memory("scatter", device)
    dist = _distribution(target, dims, len(shape))
    rows = shape or (1,)
    if grid.rank != root or tensor is None:
        # With requires_grad as on the root: all ranks record the same graph, and take part in its messages.
        tensor = torch.empty((0, *rows[1:]), dtype=dtype, device=device, requires_grad=requires_grad)
    # A single value is sent as one row.
    elif not shape:
        tensor = tensor.reshape(1)
    device_transport.choose_transport(grid.world, tensor)
    # A distribution in which the root owns all rows: sending them is then an ordinary redistribution.
    # Boundaries 0, ..., 0, rows, ..., rows: the blocks of all ranks but the root are empty.
    at_root = (0,) * (root + 1) + (rows[0],) * (grid.size - root)
    source = Distribution(grid.flat, ("n",) + (None,) * (len(rows) - 1), boundaries={"n": at_root})
    local = collectives.redistribute(tensor, source, dist if shape else Distribution(grid, (None,)), rows)
    return DistTensor(local.reshape(dist.local_shape(shape)).contiguous(), dist, shape)


def gather(tensor: DistTensor | torch.Tensor) -> torch.Tensor:
    """Return the full tensor on every rank.

    Collective: call on every rank. Differentiable: the backward pass slices the gradient.

    Parameters
    ----------
    tensor : DistTensor or Tensor
        The tensor. A plain tensor is returned unchanged.

    Returns
    -------
    Tensor
        The full tensor, a plain one that does not share memory with the block.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> x = dc.scatter(torch.arange(4.0), dc.ProcessGrid(n=1))
    >>> dc.gather(x)
    tensor([0., 1., 2., 3.])
    """
    return tensor.gather() if isinstance(tensor, DistTensor) else tensor


def from_local(local: torch.Tensor, dist: Distribution, shape: Sequence[int]) -> DistTensor:
    """Make a distributed tensor of blocks that ranks already have.

    Collective: call on every rank. Differentiable with respect to ``local``.

    Parameters
    ----------
    local : Tensor
        This rank's block, of the shape ``dist.local_shape(shape)``. A contiguous block is not copied. Ranks along axes
        that do not split the tensor must pass identical blocks, which is not checked.
    dist : Distribution
        Which rank owns which indices.
    shape : sequence of int
        Global shape.

    Returns
    -------
    DistTensor

    Raises
    ------
    MismatchError
        On every rank, if shape, dtype, device type, ``requires_grad`` or distribution differ between ranks.
    DistributionError
        On every rank, if a block has the wrong shape, or is on the device ``meta``.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> dist = dc.Distribution(dc.ProcessGrid(h=1), "nchw")
    >>> block = torch.zeros(dist.local_shape((2, 3, 8, 8)))  # for example, read from a file
    >>> dc.from_local(block, dist, (2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
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
