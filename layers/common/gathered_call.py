"""The fallback for functions without an operator: gather, call on every rank, split the result.

The dispatcher calls :func:`gathered_call`; operators call :func:`call_along_dims` for functions that need complete
lines along some dimensions. The rules:

- A result is split along the dimensions that an argument has with the same size at the same index, and is replicated
  otherwise. Plain tensors count as replicated.
- All ranks compute the same, so no gradient is summed. A gathered argument gets its block of the full gradient, and a
  plain argument the full gradient.
- If the call changes an argument in place, ``out=`` included, its values are written back to the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from distconv import recording
from distconv.dispatch import map_leaves, register_fallback, short_name
from distconv.distribution import Distribution
from distconv.errors import NoRule, ReplicationWarning, UnsupportedOperation
from distconv.layers.common.alignment import all_to_all_transpose, as_distributed, matching_distribution
from distconv.layers.common.call_site import warn_once
from distconv.layers.common.inplace_views import (
    TakeView,
    raise_on_write_back,
    record_copied_view,
    record_inplace_change,
    record_shared_view,
)
from distconv.layers.common.random_state import check_same_generator_state, random_states
from distconv.process.environment import FALLBACK, FALLBACK_LIMIT
from distconv.tensor import DistTensor

level = FALLBACK.value_or_default()
"""The value of ``DISTCONV_FALLBACK``; ``"error"`` disables the fallback."""
limit_bytes = FALLBACK_LIMIT.value_or_default()
"""Bytes that a call may gather on each rank (``DISTCONV_FALLBACK_LIMIT``)."""

_ELEMENT_BY_ELEMENT = (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_)
"""Functions that change tensors without increasing autograd's version counter."""


@register_fallback
def gathered_call(
    error: NoRule | None, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function on full tensors on every rank.

    Collective: call on every rank.

    Parameters
    ----------
    error : NoRule or None
        The reason: no operator exists. None if a tensor has no elements, which is always permitted.
    function : callable
        The function of torch, or of another package, that was called.
    args : sequence
        Its arguments.
    kwargs : mapping
        Its keyword arguments.

    Returns
    -------
    object
        The result of ``function`` with each dense tensor as a DistTensor. Sparse, quantized and nested tensors stay
        plain, and arguments are returned as they were passed.

    Raises
    ------
    UnsupportedOperation
        If ``DISTCONV_FALLBACK=error``, or if more bytes would be gathered than ``DISTCONV_FALLBACK_LIMIT`` permits.
    """
    leaves = tree_leaves((args, kwargs))
    # By identity: a tensor that is passed twice is gathered once, and the function sees the alias.
    distributed = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, DistTensor)}.values())
    if error is not None:
        # Before the first message, so that all ranks raise and none waits.
        _warn_or_raise(error, function, distributed)
    # These may change tensors without increasing autograd's version counter (a user's autograd.Function: by .data).
    compares = function in _ELEMENT_BY_ELEMENT or isinstance(getattr(function, "__self__", None), type)
    # Gathers in the order of the arguments, which is the same on all ranks.
    gathered = {id(x): _GatheredArgument(x, compares_values=compares) for x in distributed}

    def full(leaf: Any) -> Any:
        return gathered[id(leaf)].full if isinstance(leaf, DistTensor) else leaf

    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    # Only the call shows which generators the function uses. So states are compared between ranks afterwards.
    before = random_states(distributed[0].device, generators)
    # All ranks run torch's function on the same values, so results are identical without communication.
    result = function(*map_leaves(full, tuple(args)), **map_leaves(full, dict(kwargs)))
    after = random_states(distributed[0].device, generators)
    for generator, state, now in zip([None, *generators, None], before, after, strict=False):
        if now != state:  # all ranks have drawn from it: they call the same function
            check_same_generator_state(distributed[0], generator)
    for argument in gathered.values():
        # The same on all ranks, which had the same values before and after.
        if argument.has_changed():
            argument.write_back()
    # A function that returns an argument returns the object that the caller passed.
    plain = {id(leaf) for leaf in leaves}
    name = short_name(function)
    return map_leaves(lambda y: y if id(y) in plain else _to_dist_tensor(name, y, list(gathered.values())), result)


def call_along_dims(
    function: Callable[..., Any], input: DistTensor, dims: Sequence[int], *args: Any, **named: Any
) -> Any:
    """Call a function on a tensor with only some dimensions gathered.

    Collective: call on every rank. For functions that compute each line along ``dims`` independently of other lines.

    Parameters
    ----------
    function : callable
        Takes this rank's block, in which ``dims`` are complete.
    input : DistTensor
    dims : sequence of int
        Dimensions along which ``function`` computes.
    *args, **named
        Further arguments of ``function``.

    Returns
    -------
    object
        The result of ``function`` with each tensor as a DistTensor. A result with as many dimensions as ``input`` is
        split as ``input`` is; otherwise ``dims`` are assumed to be removed.
    """
    argument = _GatheredArgument(input, dims)
    result = function(argument.full, *args, **named)
    return map_leaves(lambda y: _to_dist_tensor(function.__name__, y, [argument], dims), result)


def _warn_or_raise(error: NoRule, function: object, distributed: Iterable[DistTensor]) -> None:
    """Warn about the bytes to be gathered; raise UnsupportedOperation if this is not permitted."""
    sizes = [x.numel() * x.element_size() for x in distributed if x.dist.split_axes]
    if level == "error" or not distributed:
        raise UnsupportedOperation(*error.args)
    if sum(sizes) > limit_bytes:
        raise UnsupportedOperation(
            f"{_as_sentence(error)} Without a rule every rank would gather {sum(sizes):,} bytes, more than "
            f"DISTCONV_FALLBACK_LIMIT={limit_bytes:,.0f}."
        )
    if sizes:
        message = f"{_as_sentence(error)} Every rank gathers {sum(sizes):,} bytes and computes the full result."
        warn_once(message, ReplicationWarning, function)


def _as_sentence(error: NoRule) -> str:
    return f"{error}".removesuffix(".") + "."


# -- arguments --------------------------------------------------------------------------------------------------------


class _GatheredArgument:
    """A gathered argument, and the state from before the call to find in-place changes.

    ``gathered`` is the argument with ``dims`` gathered (None: all dimensions), and ``full`` its local tensor, which is
    passed to the call. With ``compares_values``, changes are found by comparing values instead of version counters.
    """

    def __init__(self, tensor: DistTensor, dims: Sequence[int] | None = None, *, compares_values: bool = False) -> None:
        self.tensor = tensor
        self.gathered = tensor.replicated() if dims is None else all_to_all_transpose(tensor, dims)
        self.full = self.gathered.local
        # Inference tensors have no version counter.
        self._compares_values = compares_values or self.full.is_inference()
        self._before = self._state()

    def _state(self) -> Any:
        return self.full.detach().clone() if self._compares_values else self.full._version

    def has_changed(self) -> bool:
        """Return True if the call has changed the values."""
        now = self._state()
        if not isinstance(now, torch.Tensor):
            return bool(now != self._before)
        with recording.paused():  # A replay does not compare again; it repeats the recorded decision.
            return not torch.equal(now, self._before)

    def write_back(self) -> None:
        """Write the values after the call to the blocks of the argument. Collective."""
        x, full = self.tensor, self.full
        # If nothing was gathered, `full` is the block itself, and the call has changed the argument already.
        if full is not x.local and full.shape != x.shape:
            raise UnsupportedOperation(
                f"a DistTensor of shape {tuple(x.shape)} cannot become one of {tuple(full.shape)} in place. Assign "
                "the result instead."
            )
        if full is not x.local:
            x.local.copy_(as_distributed(full, x.grid).redistribute(x.dist).local)
        elif full.shape != x.shape:
            # The call has changed the shape of the block itself.
            x._set_layout(as_distributed(full, x.grid).dist, full.shape, x._strides)
        record_inplace_change(x)

    def shares_memory(self, result: torch.Tensor) -> bool:
        """Return True if ``result`` is a view of the gathered tensor's memory."""
        memory = self.full.untyped_storage().data_ptr()
        # Tensors without elements all have the address 0, but share no memory.
        return memory != 0 and result.untyped_storage().data_ptr() == memory


# -- results ----------------------------------------------------------------------------------------------------------


def _to_dist_tensor(
    name: str, result: Any, arguments: Sequence[_GatheredArgument], dims: Sequence[int] | None = None
) -> Any:
    """Return a result of the call as a DistTensor that is recorded as a view if it shares an argument's memory."""
    if isinstance(result, DistTensor):
        raise UnsupportedOperation(
            f"{name}: the function uses a DistTensor that is not among its arguments (from a closure, or a module's "
            "weight), whose gradient would be lost. Pass it as an argument."
        )
    special = isinstance(result, torch.Tensor) and (result.is_quantized or result.is_nested)
    if not isinstance(result, torch.Tensor) or special or result.layout is not torch.strided:
        return result  # These stay plain and replicated, because a DistTensor wraps strided tensors only.
    for argument in arguments:
        if result is argument.full:
            return argument.tensor
    y = _distribute_result(result, arguments, dims)
    if dims is None and not result.is_contiguous():
        # Strides of the full result, as a single process shows them. Those of a block say nothing about them.
        y._set_layout(y.dist, y.shape, result.stride())
    for argument in arguments:
        if argument.shares_memory(result):
            retake, write_back = _view_functions(name, result, argument, y.dist)
            # Without a gather before the call and a split after it, the result views the argument's own block.
            if argument.full is argument.tensor.local and y.local is result:
                return record_shared_view(y, argument.tensor, retake)
            return record_copied_view(y, argument.tensor, retake, write_back)
    return y


def _distribute_result(
    result: torch.Tensor, arguments: Sequence[_GatheredArgument], dims: Sequence[int] | None
) -> DistTensor:
    """Return ``result`` split as an argument of its shape is; if only ``dims`` were gathered, as the input is."""
    first = arguments[0].gathered
    if dims is None or not first.dist.split_axes:
        y = as_distributed(result, first.grid)
    elif result.dim() == first.dim():
        # Along gathered dimensions the block has the global size; along the others only the argument has it.
        shape = torch.Size(result.shape[d] if d in dims else n for d, n in enumerate(first.shape))
        y = DistTensor(result, first.dist, shape)
        if shape != arguments[0].tensor.shape:
            return y.redistribute(arguments[0].tensor.dist.balanced())
    else:
        left = [d for d in range(first.dim()) if d not in dims]
        axes = [first.dist.axes[d] for d in left]
        y = DistTensor(result, first.dist.with_axes(axes), torch.Size(first.shape[d] for d in left))
    candidates = [argument.tensor.dist for argument in arguments if argument.tensor.shape == y.shape]
    if dims is None and not candidates:
        matching = (matching_distribution(argument.tensor, y.shape) for argument in arguments)
        candidates = [dist for dist in matching if dist.split_axes]
    # An argument of the same shape shows how the model splits such tensors: the next operator then needs no
    # redistribution.
    return y.redistribute(candidates[0] if candidates else y.dist)


def _view_functions(
    name: str, result: torch.Tensor, argument: _GatheredArgument, dist: Distribution
) -> tuple[TakeView, Callable[[DistTensor], object]]:
    """Return two functions for ``result``, a view of an argument.

    The first takes the view again; the second writes the values of the view to the argument.
    """
    source, full = argument.tensor, argument.full
    # The view is described by strides, which is possible only for the same elements of a contiguous tensor.
    same_elements = result.dtype == full.dtype and result.is_conj() == full.is_conj()
    if not same_elements or not full.is_contiguous() or full.shape != source.shape:
        return _raise_on_retake(name), raise_on_write_back(name)
    layout = (result.shape, result.stride(), result.storage_offset() - full.storage_offset())

    def retake() -> DistTensor:
        # The strides of the result refer to a contiguous full tensor.
        view = source.replicated().local.contiguous().as_strided(*layout)
        return as_distributed(view, source.grid).redistribute(dist)

    def write_back(view: DistTensor) -> None:
        values = source.replicated().local.clone(memory_format=torch.contiguous_format)
        values.as_strided(*layout).copy_(view.replicated().local)
        source.copy_(as_distributed(values, source.grid))

    return retake, write_back


def _raise_on_retake(name: str) -> TakeView:
    """Return a function that raises because the view cannot be taken again."""

    def raise_unsupported() -> DistTensor:
        raise UnsupportedOperation(
            f"{name}: its argument was changed in place after the call. In torch the result shares memory with the "
            f"argument, but this result is a copy. Call {name} after the change."
        )

    return raise_unsupported
