"""Bring operands to one layout, and ask torch itself what shape a result has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch

from distconv.communication.collectives import both_with_grad_allreduce, gather_region, with_grad_allreduce
from distconv.communication.transfer import transfer_plan
from distconv.distribution import Distribution
from distconv.errors import DtypeError, ShapeError
from distconv.grid import ProcessGrid
from distconv.memory_order import TensorKey, has_any, key_function, restore_arguments
from distconv.precision import HALF
from distconv.tensor import DistTensor

_REFUSALS = (RuntimeError, ValueError, ZeroDivisionError)
"""What torch's functions and its meta implementations raise on shapes that they do not take."""


_FEW = 1 << 16
"""Elements of a tensor with which torch's function is tried out."""


def as_distributed(tensor: torch.Tensor, grid: ProcessGrid) -> DistTensor:
    """``tensor`` itself, or a plain one as a replicated DistTensor."""
    if isinstance(tensor, DistTensor):
        return tensor
    return DistTensor(tensor, Distribution(grid, (None,) * tensor.dim()), tensor.shape)


def common_distribution(operands: Sequence[torch.Tensor], shape: torch.Size) -> Distribution:
    """Layout of the broadcast result: the first DistTensor's, plus splits that only a later one has."""
    distributed = [t for t in operands if isinstance(t, DistTensor)]
    grid = distributed[0].grid
    axes: list[str | None] = [None] * len(shape)
    boundaries: dict[str, Sequence[int]] = {}
    cyclic: dict[str, int] = {}
    for tensor in distributed:
        offset = len(shape) - tensor.dim()
        for dim, axis in enumerate(tensor.dist.axes):
            at = dim + offset
            if axis is None or axes[at] is not None or axis in axes or tensor.shape[dim] != shape[at]:
                continue
            axes[at] = axis
            if tensor.grid != grid:
                continue
            if axis in tensor.dist.boundaries:
                boundaries[axis] = tensor.dist.boundaries[axis]
            if axis in tensor.dist.cyclic:
                cyclic[axis] = tensor.dist.cyclic[axis]
    return Distribution(grid, axes, boundaries=boundaries, cyclic=cyclic)


def matching_distribution(x: DistTensor, shape: Sequence[int]) -> Distribution:
    """Return the layout of a tensor of ``shape`` made after ``x``.

    It has the splits of ``x`` along the dimensions that have the same extent, above one, in the same place.
    """
    if tuple(shape) == tuple(x.shape):
        return x.dist
    pairs = zip(x.dist.split, x.shape, shape, strict=False)
    axes = [axis if n == m and n > 1 else None for axis, n, m in pairs]
    return x.dist.with_axes([*axes, *(None,) * (len(shape) - len(axes))])


def aligned(tensor: torch.Tensor, dist: Distribution, shape: torch.Size) -> torch.Tensor:
    """Block of ``tensor`` that broadcasts against this rank's block of a result of ``shape`` under ``dist``.

    Over an axis that splits the result but not ``tensor`` the adjoint sums; a whole tensor of full extent is sliced.
    """
    if isinstance(tensor, DistTensor) and tensor.dist is dist and tensor.shape == shape:
        return tensor.local
    offset = len(shape) - tensor.dim()
    axes = [dist.axes[d + offset] if n == shape[d + offset] else None for d, n in enumerate(tensor.shape)]
    wanted = dist.with_axes(axes)
    return entering(tensor, wanted, [axis for axis in dist.split_axes if axis not in wanted.split_axes])


def entering(tensor: torch.Tensor, dist: Distribution, axes: Sequence[str | None]) -> torch.Tensor:
    """This rank's block of ``tensor`` under ``dist`` as it enters work split over ``axes``, over which it is whole.

    The adjoint sums over ``axes``; what was split over them is gathered, and gets its sums by a reduce-scatter, which
    moves half of what an allreduce does and holds no sum that this rank does not need.
    """
    operand, grid = as_distributed(tensor, dist.grid), dist.grid
    gathered = [axis for axis in operand.dist.split_axes if axis in axes] if operand.grid == grid else []
    if not gathered or operand.dist.without(gathered) != dist:
        return with_grad_allreduce(operand.redistribute(dist).local, grid, axes)
    block = with_grad_allreduce(operand.local, grid, [axis for axis in axes if axis not in gathered])
    return gather_region(block, transfer_plan(operand.dist, dist, tuple(operand.shape)))


def transposed(tensor: DistTensor, dims: Sequence[int]) -> DistTensor:
    """``tensor`` with ``dims`` whole, by an all-to-all of blocks as far as other dimensions can be split instead."""
    return tensor.redistribute(tensor.dist.transposed(dims, tensor.shape))


def whole_over(tensor: torch.Tensor, dist: Distribution) -> torch.Tensor:
    """A parameter (or any tensor) in full, as it enters work that ``dist`` splits; its gradient is summed there."""
    if not isinstance(tensor, DistTensor):
        return with_grad_allreduce(tensor, dist.grid, dist.split_axes)
    return entering(tensor, Distribution(dist.grid, (None,) * tensor.dim()), dist.split_axes)


def both_whole_over(
    weight: torch.Tensor, bias: torch.Tensor | None, dist: Distribution
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`whole_over` of a layer's weight and bias, if it has one."""
    if bias is None or isinstance(weight, DistTensor) or isinstance(bias, DistTensor):
        return whole_over(weight, dist), None if bias is None else whole_over(bias, dist)
    return both_with_grad_allreduce(weight, bias, dist.grid, dist.split_axes)


def _shape_of(tensor: torch.Tensor) -> TensorKey:
    """Return the key of ``tensor``. Dtypes that ``torch.autocast`` converts to one another have the same key."""
    half = torch._C._is_any_autocast_enabled() and tensor.dtype in HALF
    return TensorKey(tensor.shape, None, torch.float32 if half else tensor.dtype)


_frozen = key_function(_shape_of)


def _without_memory(of: TensorKey) -> torch.Tensor:
    # An expanded tensor without elements would have strides that some functions reject.
    return torch.zeros(of.shape if 0 in of.shape else (), dtype=of.dtype).expand(of.shape)


def _called(function: Callable[..., Any], args: Any, kwargs: Any, make: Callable[[TensorKey], torch.Tensor]) -> Any:
    return function(*restore_arguments(args, make), **{k: restore_arguments(v, make) for k, v in kwargs})


@lru_cache(maxsize=4096)
def _meta_result(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.Size:
    try:
        result = _called(function, args, kwargs, TensorKey.meta_tensor)
    except _REFUSALS as error:
        refused: Exception | None = error
    else:
        refused = None
        if result.numel() and not has_any((args, kwargs), lambda tensor: 0 in tensor.shape):
            return torch.Size(result.shape)
    # Meta tensors have other error messages than real ones, and accept tensors without elements that kernels reject.
    try:
        result = _called(function, args, kwargs, _without_memory)
    except _REFUSALS as error:
        refused = error
    if refused is not None:
        raise ShapeError(str(refused)) from None
    return torch.Size(result.shape)


def result_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Size:
    """Shape of what torch gives for operands of these global shapes.

    Raises
    ------
    ShapeError
        With torch's own text, where torch refuses them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        given = function, _frozen(args), tuple((k, _frozen(v)) for k, v in kwargs.items())
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if first is not None and _doubtful(first):
            _tried(*given)
        return _meta_result(*given)


def _doubtful(input: torch.Tensor) -> bool:
    """Return True if torch may lack a kernel for this dtype although its meta tensors pass, and asking costs little."""
    fixed = input.dtype in (torch.float32, torch.float64) or input.device.type != "cpu"
    return not fixed and input.numel() <= _FEW and not torch._C._is_any_autocast_enabled()


@lru_cache(maxsize=4096)
def _tried(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise ShapeError where torch refuses operands like these, as it would where a block is not empty."""
    try:
        with torch.random.fork_rng(devices=()):  # the function may draw numbers
            _called(function, args, kwargs, _without_memory)
    except _REFUSALS as error:
        raise ShapeError(str(error)) from None


def check_dtypes(function: Callable[..., Any], input: torch.Tensor, *operands: Any) -> None:
    """Raise DtypeError with torch's text on all ranks if torch refuses an operand that has not the input's dtype.

    torch itself would refuse only where a block is not empty. ``operands`` are the further arguments of ``function``.

    Raises
    ------
    DtypeError
        With torch's text, where torch refuses them.
    """
    if any(isinstance(t, torch.Tensor) and t.dtype != input.dtype for t in operands):
        try:
            check_as_torch(function, input, *operands)
        except ShapeError as error:
            raise DtypeError(str(error)) from None


def check_as_torch(function: Callable[..., Any], *args: Any) -> None:
    """Raise ShapeError with torch's text where it refuses operands that its meta tensors let pass.

    Raises
    ------
    ShapeError
        With torch's text, where torch refuses the operands.
    """
    with torch._C.DisableTorchFunctionSubclass():
        _tried(function, _frozen(args), ())


@lru_cache(maxsize=4096)
def broadcast_shape(shapes: tuple[torch.Size, ...]) -> torch.Size:
    """Shape that operands of these shapes broadcast to.

    Raises
    ------
    ShapeError
        With torch's text, where they do not.
    """
    operands = [TensorKey(shape, None, torch.float32).meta_tensor() for shape in shapes]
    try:
        return reduce(torch.add, operands).shape
    except RuntimeError:
        check_as_torch(lambda *operands: reduce(torch.add, operands), *operands)
        raise


def as_autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``tensors`` in the dtype that ``torch.autocast`` computes convolutions in, where it is on.

    For operators whose work is an autograd.Function: what they save must be what they computed with.
    """
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # autocast leaves float64 alone.
    return tuple(None if t is None else t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)


def as_cast_for(x: DistTensor, probe: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> DistTensor:
    """``x`` in the dtype to which ``torch.autocast``, where it is on, converts the input of ``probe``.

    ``probe`` is called with one small block of ``shape``: a rank's own may be empty and take another way.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return DistTensor(x.local.to(probe(x.local.new_zeros(shape)).dtype), x.dist, x.shape)


def balanced_input(tensor: DistTensor) -> DistTensor:
    """``tensor`` with balanced blocks, as operators take it that compute a block's extent from the output's."""
    if tensor.dist.boundaries or tensor.dist.cyclic:
        return tensor.redistribute(tensor.dist.balanced())
    return tensor
