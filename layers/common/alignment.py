"""Operands and parameters in the distribution of an operator, and shapes and errors obtained from torch.

Called by almost every operator. An operator first checks its operands (:func:`result_shape`, :func:`check_dtypes`), so
that all ranks raise torch's error before any message is sent. Then it brings them to one distribution
(:func:`common_distribution`, :func:`broadcast_block`, :func:`replicate_parameter`). The module does not depend on any
operator.
"""

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

_TORCH_ERRORS = (RuntimeError, ValueError, ZeroDivisionError)
"""Exceptions that torch's functions and their meta implementations raise for unsupported operands."""

_MAX_PROBED_ELEMENTS = 1 << 16
"""Largest number of elements for which torch's function is called on zeros to find its errors."""


def as_distributed(tensor: torch.Tensor, grid: ProcessGrid) -> DistTensor:
    """Return a tensor as a DistTensor; a plain tensor counts as replicated.

    Parameters
    ----------
    tensor : Tensor or DistTensor
    grid : ProcessGrid
        The grid of the result if ``tensor`` is plain.

    Returns
    -------
    DistTensor
        ``tensor`` itself if it is a DistTensor.
    """
    if isinstance(tensor, DistTensor):
        return tensor
    return DistTensor(tensor, Distribution(grid, (None,) * tensor.dim()), tensor.shape)


def first_grid(*values: Any) -> ProcessGrid:
    """Return the grid of the first DistTensor.

    Parameters
    ----------
    *values : object
        At least one of them is a DistTensor.

    Returns
    -------
    ProcessGrid
    """
    return next(value.grid for value in values if isinstance(value, DistTensor))


def common_distribution(operands: Sequence[torch.Tensor], shape: torch.Size) -> Distribution:
    """Return the distribution of the result that operands broadcast to.

    It has the splits of the first DistTensor, and the splits of later ones along dimensions that are not split yet.

    Parameters
    ----------
    operands : sequence of Tensor
        At least one of them is a DistTensor. Dimensions are aligned at the last one, as in broadcasting.
    shape : torch.Size
        Global shape of the result.

    Returns
    -------
    Distribution
        Over the grid of the first DistTensor. A dimension that an operand broadcasts is not split by that operand.
    """
    distributed = [t for t in operands if isinstance(t, DistTensor)]
    grid = distributed[0].grid
    axes: list[str | None] = [None] * len(shape)
    boundaries: dict[str, Sequence[int]] = {}
    cyclic: dict[str, int] = {}
    for tensor in distributed:
        offset = len(shape) - tensor.dim()
        for dim, axis in enumerate(tensor.dist.axes):
            at = dim + offset
            # The first operand that splits a dimension decides; an axis splits one dimension only; a size of one is
            # broadcast.
            if axis is None or axes[at] is not None or axis in axes or tensor.shape[dim] != shape[at]:
                continue
            axes[at] = axis
            # Boundaries refer to the ranks of another grid, which may have other numbers of parts.
            if tensor.grid != grid:
                continue
            if axis in tensor.dist.boundaries:
                boundaries[axis] = tensor.dist.boundaries[axis]
            if axis in tensor.dist.cyclic:
                cyclic[axis] = tensor.dist.cyclic[axis]
    return Distribution(grid, axes, boundaries=boundaries, cyclic=cyclic)


def matching_distribution(x: DistTensor, shape: Sequence[int]) -> Distribution:
    """Return the distribution for a tensor of another shape that is derived from ``x``.

    Parameters
    ----------
    x : DistTensor
    shape : sequence of int
        Global shape of the derived tensor.

    Returns
    -------
    Distribution
        Splits a dimension as ``x`` does if both have the same size, above one, at the same index.
    """
    if tuple(shape) == tuple(x.shape):
        return x.dist
    pairs = zip(x.dist.split, x.shape, shape, strict=False)
    axes = [axis if n == m and n > 1 else None for axis, n, m in pairs]
    return x.dist.with_axes([*axes, *(None,) * (len(shape) - len(axes))])


def broadcast_block(tensor: torch.Tensor, dist: Distribution, shape: torch.Size) -> torch.Tensor:
    """Return the block of an operand that broadcasts against this rank's block of the result.

    Collective: call on every rank. Over axes that split the result but not the operand, backward all-reduces the
    operand's gradient.

    Parameters
    ----------
    tensor : Tensor or DistTensor
        The operand. A plain tensor is identical on all ranks.
    dist : Distribution
        Distribution of the result.
    shape : torch.Size
        Global shape of the result.

    Returns
    -------
    Tensor
        This rank's block.
    """
    if isinstance(tensor, DistTensor) and tensor.dist is dist and tensor.shape == shape:
        return tensor.local
    offset = len(shape) - tensor.dim()
    axes = [dist.axes[d + offset] if n == shape[d + offset] else None for d, n in enumerate(tensor.shape)]
    operand_dist = dist.with_axes(axes)
    # The adjoint of a broadcast is a sum: over these axes each rank has the contribution of its own block.
    reduced = [axis for axis in dist.split_axes if axis not in operand_dist.split_axes]
    return redistribute_with_grad_reduce(tensor, operand_dist, reduced)


def redistribute_with_grad_reduce(tensor: torch.Tensor, dist: Distribution, axes: Sequence[str | None]) -> torch.Tensor:
    """Return this rank's block of an operand whose gradient is all-reduced over ``axes``.

    Collective: call on every rank. Used where the work is split over ``axes`` but the operand is not. If the operand is
    split over some of these axes, it is gathered, and backward reduce-scatters its gradient. A reduce-scatter moves
    half as much as an all-reduce and stores no sums that this rank does not need.

    Parameters
    ----------
    tensor : Tensor or DistTensor
        The operand. A plain tensor is identical on all ranks.
    dist : Distribution
        Distribution of the operand in the work.
    axes : sequence of str or None
        Axes that split the work but not the operand. None stands for a dimension that is not split.

    Returns
    -------
    Tensor
        This rank's block under ``dist``.
    """
    operand, grid = as_distributed(tensor, dist.grid), dist.grid
    # The adjoint of a gather adds gradients at the owners, so these axes need no all-reduce of the gradient. Axes of
    # another grid may have the same names, but are other ranks.
    gathered = [axis for axis in operand.dist.split_axes if axis in axes] if operand.grid == grid else []
    # If more than a gather is necessary (other edges or axes): redistribute. Its backward takes the gradient of one of
    # several replicas, so the contributions must have been summed before.
    if not gathered or operand.dist.without(gathered) != dist:
        return with_grad_allreduce(operand.redistribute(dist).local, grid, axes)
    block = with_grad_allreduce(operand.local, grid, [axis for axis in axes if axis not in gathered])
    return gather_region(block, transfer_plan(operand.dist, dist, tuple(operand.shape)))


def all_to_all_transpose(tensor: DistTensor, dims: Sequence[int]) -> DistTensor:
    """Return a tensor with some dimensions not split, by an all-to-all if other dimensions can be split instead.

    Collective: call on every rank.

    Parameters
    ----------
    tensor : DistTensor
    dims : sequence of int
        Dimensions that the result does not split.

    Returns
    -------
    DistTensor
        The same global tensor, distributed by :meth:`Distribution.transposed`.
    """
    return tensor.redistribute(tensor.dist.transposed(dims, tensor.shape))


def replicate_parameter(tensor: torch.Tensor, dist: Distribution) -> torch.Tensor:
    """Return a full tensor on every rank whose gradient is all-reduced over the axes that split the work.

    Collective: call on every rank. For parameters that each rank applies to its own block.

    Parameters
    ----------
    tensor : Tensor or DistTensor
        A plain tensor is identical on all ranks.
    dist : Distribution
        Distribution of the work, such as that of the layer's input.

    Returns
    -------
    Tensor
        The full tensor.
    """
    if not isinstance(tensor, DistTensor):
        return with_grad_allreduce(tensor, dist.grid, dist.split_axes)
    return redistribute_with_grad_reduce(tensor, Distribution(dist.grid, (None,) * tensor.dim()), dist.split_axes)


def replicate_parameters(
    weight: torch.Tensor, bias: torch.Tensor | None, dist: Distribution
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the full weight and the full bias of a layer, as :func:`replicate_parameter` does.

    Collective: call on every rank. The gradients of a plain weight and bias are all-reduced by one call.

    Parameters
    ----------
    weight : Tensor or DistTensor
    bias : Tensor or DistTensor, optional
    dist : Distribution
        Distribution of the work.

    Returns
    -------
    tuple of Tensor and (Tensor or None)
    """
    # Two replicated tensors share one all-reduce, which saves a latency per layer.
    if bias is None or isinstance(weight, DistTensor) or isinstance(bias, DistTensor):
        return replicate_parameter(weight, dist), None if bias is None else replicate_parameter(bias, dist)
    return both_with_grad_allreduce(weight, bias, dist.grid, dist.split_axes)


def _tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Return the key of ``tensor``. Dtypes that ``torch.autocast`` converts to one another have the same key."""
    # Autocast does not cover meta tensors: mixed operands would be rejected, although the kernels convert them.
    half = torch._C._is_any_autocast_enabled() and tensor.dtype in HALF
    return TensorKey(tensor.shape, None, torch.float32 if half else tensor.dtype)


_argument_key = key_function(_tensor_key)


def _expanded_zeros(key: TensorKey) -> torch.Tensor:
    """Return zeros of the shape and dtype of ``key`` that occupy the memory of one element."""
    # An expanded tensor without elements would have strides that some functions reject.
    return torch.zeros(key.shape if 0 in key.shape else (), dtype=key.dtype).expand(key.shape)


def _call_with_tensors(
    function: Callable[..., Any], args: Any, kwargs: Any, make: Callable[[TensorKey], torch.Tensor]
) -> Any:
    """Call ``function`` with each tensor key in its arguments replaced by the tensor that ``make`` returns for it."""
    return function(*restore_arguments(args, make), **{k: restore_arguments(v, make) for k, v in kwargs})


@lru_cache(maxsize=4096)
def _meta_result(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.Size:
    """Return the shape of the result for operands with these keys.

    If torch rejects them, raise ShapeError with its message.
    """
    # 1. On meta tensors, which cost no memory. 2. On zeros, only if the first call raises or is not reliable. Rejected
    # operands are not cached: lru_cache stores results and no exceptions.
    try:
        result = _call_with_tensors(function, args, kwargs, TensorKey.meta_tensor)
    except _TORCH_ERRORS as error:
        rejection: Exception | None = error
    else:
        rejection = None
        if result.numel() and not has_any((args, kwargs), lambda tensor: 0 in tensor.shape):
            return torch.Size(result.shape)
    # Meta tensors have other error messages than real ones, and accept tensors without elements that kernels reject.
    try:
        result = _call_with_tensors(function, args, kwargs, _expanded_zeros)
    except _TORCH_ERRORS as error:
        rejection = error
    if rejection is not None:
        raise ShapeError(str(rejection)) from None
    return torch.Size(result.shape)


def result_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Size:
    """Return the global shape that torch's function computes from operands of these global shapes.

    No communication. The result depends on shapes, dtypes and options alone, so all ranks return or raise the same.

    Parameters
    ----------
    function : callable
        A function of torch that returns one tensor.
    *args, **kwargs
        Its arguments. Values of tensors are not used.

    Returns
    -------
    torch.Size

    Raises
    ------
    ShapeError
        If torch rejects the operands, with torch's message.
    """
    # Otherwise each shape and dtype that is read here would be looked up by the dispatcher, as an operator.
    with torch._C.DisableTorchFunctionSubclass():
        key = function, _argument_key(args), tuple((k, _argument_key(v)) for k, v in kwargs.items())
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        # torch may lack a kernel for other dtypes although its meta tensors pass. A call of few elements costs little.
        if (
            first is not None
            and first.dtype not in (torch.float32, torch.float64)
            and first.device.type == "cpu"
            and first.numel() <= _MAX_PROBED_ELEMENTS
            and not torch._C._is_any_autocast_enabled()
        ):
            _call_on_zeros(*key)
        return _meta_result(*key)


def first_result(function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the first tensor that a function returns. For :func:`result_shape` of functions with several results.

    Parameters
    ----------
    function : callable
        Returns a tensor, or several.
    *args, **kwargs
        Its arguments.

    Returns
    -------
    Tensor
    """
    results = function(*args, **kwargs)
    result: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
    return result


@lru_cache(maxsize=4096)
def _call_on_zeros(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call ``function`` on zeros; raise ShapeError with torch's message if it rejects operands like these."""
    try:
        with torch.random.fork_rng(devices=()):  # the function may draw numbers
            _call_with_tensors(function, args, kwargs, _expanded_zeros)
    except _TORCH_ERRORS as error:
        raise ShapeError(str(error)) from None


def check_dtypes(function: Callable[..., Any], input: torch.Tensor, *operands: Any) -> None:
    """Check that torch accepts operands whose dtype differs from the input's dtype.

    Without this check, torch would raise only on ranks whose block is not empty. No communication.

    Parameters
    ----------
    function : callable
        A function of torch.
    input : Tensor
        Its first argument.
    *operands
        Its further arguments.

    Raises
    ------
    DtypeError
        If torch rejects the operands, with torch's message.
    """
    # Equal dtypes, the usual case, need no call.
    if any(isinstance(t, torch.Tensor) and t.dtype != input.dtype for t in operands):
        try:
            check_on_zeros(function, input, *operands)
        except ShapeError as error:
            raise DtypeError(str(error)) from None


def check_on_zeros(function: Callable[..., Any], *args: Any) -> None:
    """Check that torch's function accepts operands whose errors its meta implementation does not find.

    No communication.

    Parameters
    ----------
    function : callable
        A function of torch. It is called on zeros of the operands' shapes.
    *args
        Its arguments.

    Raises
    ------
    ShapeError
        If torch rejects the operands, with torch's message.
    """
    with torch._C.DisableTorchFunctionSubclass():
        _call_on_zeros(function, _argument_key(args), ())


@lru_cache(maxsize=4096)
def broadcast_shape(shapes: tuple[torch.Size, ...]) -> torch.Size:
    """Return the shape to which operands of these shapes broadcast.

    Parameters
    ----------
    shapes : tuple of torch.Size
        Global shapes.

    Returns
    -------
    torch.Size

    Raises
    ------
    ShapeError
        If the shapes do not broadcast, with torch's message.
    """
    operands = [TensorKey(shape, None, torch.float32).meta_tensor() for shape in shapes]
    try:
        return reduce(torch.add, operands).shape
    except RuntimeError:
        # The message of meta tensors differs from that of real ones, which a single process would show.
        check_on_zeros(lambda *operands: reduce(torch.add, operands), *operands)
        raise


def to_autocast_dtype(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return tensors in the dtype in which ``torch.autocast`` computes convolutions, if it is enabled.

    For operators that are an ``autograd.Function``: autocast does not convert their arguments, and they must save the
    tensors that they compute with.

    Parameters
    ----------
    *tensors : Tensor or None
        On one device. float64 is not converted.

    Returns
    -------
    tuple of Tensor or None
    """
    # Autocast is enabled for each type of device separately.
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # autocast does not convert float64.
    return tuple(None if t is None else t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)


def to_probed_dtype(x: DistTensor, probe: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> DistTensor:
    """Return a tensor in the dtype to which ``torch.autocast``, if it is enabled, converts the input of a function.

    Parameters
    ----------
    x : DistTensor
    probe : callable
        The function. It is called with zeros instead of the rank's block, because torch may treat an empty block
        differently and ranks would differ in their dtype.
    *shape : int
        Shape of the zeros.

    Returns
    -------
    DistTensor
        ``x`` converted to the dtype of the result of ``probe``.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return DistTensor(x.local.to(probe(x.local.new_zeros(shape)).dtype), x.dist, x.shape)


def redistribute_balanced(tensor: DistTensor) -> DistTensor:
    """Return a tensor in balanced blocks.

    Collective: call on every rank. For operators that compute the size of an input block from that of the output block.

    Parameters
    ----------
    tensor : DistTensor

    Returns
    -------
    DistTensor
        ``tensor`` itself if its blocks are balanced.
    """
    if tensor.dist.boundaries or tensor.dist.cyclic:
        return tensor.redistribute(tensor.dist.balanced())
    return tensor
