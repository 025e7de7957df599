"""The fallback for functions without an operator: gather, call on every rank, split the result.

The dispatcher calls :func:`gathered_call`; operators call :func:`called_along` for functions that need complete lines
along some dimensions. The rules:

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
from distconv.layers.common.alignment import as_distributed, matching_distribution, transposed
from distconv.layers.common.call_site import warn_once
from distconv.layers.common.inplace_views import changed, moved, no_way_back, viewed
from distconv.layers.common.random_state import agree_on_generator, random_states
from distconv.process.environment import FALLBACK, FALLBACK_LIMIT
from distconv.tensor import DistTensor

level = FALLBACK.value_or_default()
"""The value of ``DISTCONV_FALLBACK``; ``"error"`` disables the fallback."""
limit_bytes = FALLBACK_LIMIT.value_or_default()
"""Bytes that a call may gather on each rank (``DISTCONV_FALLBACK_LIMIT``)."""


_ELEMENT_BY_ELEMENT = (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_)
"""Functions that change tensors without increasing autograd's version counter."""


class _Gathered:
    """A gathered argument, and the state from before the call to find in-place changes.

    ``part`` is the argument with ``dims`` gathered (None: all dimensions), and ``whole`` its local tensor, which the
    call gets. With ``uncounted``, changes are found by comparing values instead of version counters.
    """

    def __init__(self, given: DistTensor, dims: Sequence[int] | None = None, uncounted: bool = False) -> None:
        self.given = given
        self.part = given.replicated() if dims is None else transposed(given, dims)
        self.whole = self.part.local
        self._by_value = uncounted or self.whole.is_inference()
        self._before = self._state()

    def _state(self) -> Any:
        return self.whole.detach().clone() if self._by_value else self.whole._version

    def changed(self) -> bool:
        """Return True if the call has changed the values."""
        now = self._state()
        if not isinstance(now, torch.Tensor):
            return bool(now != self._before)
        with recording.paused():  # A replay does not compare again; it repeats the recorded decision.
            return not torch.equal(now, self._before)

    def write_back(self) -> None:
        """Write the values after the call to the blocks of the argument. Collective."""
        x, whole = self.given, self.whole
        if whole is not x.local and whole.shape != x.shape:
            raise UnsupportedOperation(
                f"a DistTensor of shape {tuple(x.shape)} cannot become one of {tuple(whole.shape)} in place: assign "
                "the result instead"
            )
        if whole is not x.local:
            x.local.copy_(as_distributed(whole, x.grid).redistribute(x.dist).local)
        elif whole.shape != x.shape:
            x._set_layout(as_distributed(whole, x.grid).dist, whole.shape, x._strides)
        changed(x)

    def shares(self, result: torch.Tensor) -> bool:
        """Return True if ``result`` is a view of the gathered tensor's memory."""
        memory = self.whole.untyped_storage().data_ptr()
        return memory != 0 and result.untyped_storage().data_ptr() == memory


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
    distributed = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, DistTensor)}.values())
    if error is not None:
        _permit(error, function, distributed)
    gathered = {id(x): _Gathered(x, uncounted=_counts_no_changes(function)) for x in distributed}

    def whole(leaf: Any) -> Any:
        return gathered[id(leaf)].whole if isinstance(leaf, DistTensor) else leaf

    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    before = random_states(distributed[0].device, generators)
    result = function(*map_leaves(whole, tuple(args)), **map_leaves(whole, dict(kwargs)))
    if random_states(distributed[0].device, generators) != before:
        agree_on_generator(distributed[0], *generators)
    for argument in gathered.values():
        if argument.changed():
            argument.write_back()
    plain = {id(leaf) for leaf in leaves}
    name = short_name(function)
    return map_leaves(lambda y: y if id(y) in plain else _laid_out(name, y, list(gathered.values())), result)


def _counts_no_changes(function: Callable[..., Any]) -> bool:
    """Return True if ``function`` may change tensors without increasing autograd's version counter.

    A user's ``autograd.Function`` may do so by ``.data``.
    """
    return function in _ELEMENT_BY_ELEMENT or isinstance(getattr(function, "__self__", None), type)


def called_along(function: Callable[..., Any], input: DistTensor, dims: Sequence[int], *args: Any, **named: Any) -> Any:
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
    argument = _Gathered(input, dims)
    result = function(argument.whole, *args, **named)
    return map_leaves(lambda y: _laid_out(function.__name__, y, [argument], dims), result)


def _permit(error: NoRule, function: object, distributed: Iterable[DistTensor]) -> None:
    """Warn about the bytes to be gathered; raise UnsupportedOperation if this is not permitted."""
    sizes = [x.numel() * x.element_size() for x in distributed if x.dist.split_axes]
    if level == "error" or not distributed:
        raise UnsupportedOperation(*error.args)
    if sum(sizes) > limit_bytes:
        raise UnsupportedOperation(
            f"{error}; otherwise every rank would gather {sum(sizes):,} bytes, and DISTCONV_FALLBACK_LIMIT is "
            f"{limit_bytes:,.0f}"
        )
    if sizes:
        text = f"{error}; as it is, every rank gathers {sum(sizes):,} bytes and computes the whole"
        warn_once(text, ReplicationWarning, function)


def _laid_out(name: str, result: Any, arguments: Sequence[_Gathered], dims: Sequence[int] | None = None) -> Any:
    """Return a result of the call as a DistTensor that is recorded as a view if it shares an argument's memory."""
    if isinstance(result, DistTensor):
        raise UnsupportedOperation(
            f"{name} reaches a DistTensor other than by its arguments (a closure, a module's weight), whose gradient "
            "would be lost: pass it as an argument"
        )
    special = isinstance(result, torch.Tensor) and (result.is_quantized or result.is_nested)
    if not isinstance(result, torch.Tensor) or special or result.layout is not torch.strided:
        return result  # These stay plain and replicated, because a DistTensor wraps strided tensors only.
    for argument in arguments:
        if result is argument.whole:
            return argument.given
    y = _distributed(result, arguments, dims)
    if dims is None and not result.is_contiguous():
        y._set_layout(y.dist, y.shape, result.stride())
    for argument in arguments:
        if argument.shares(result):
            seen = argument.whole is argument.given.local and y.local is result
            again, put_back = _both_ways(name, result, argument, y.dist)
            return viewed(y, argument.given, again) if seen else moved(y, argument.given, again, put_back)
    return y


def _both_ways(
    name: str, result: torch.Tensor, argument: _Gathered, dist: Distribution
) -> tuple[Callable[[], DistTensor], Callable[[DistTensor], object]]:
    """Return two functions for ``result``, a view of an argument.

    The first takes the view again; the second writes the values of the view to the argument.
    """
    source, whole = argument.given, argument.whole
    same_elements = result.dtype == whole.dtype and result.is_conj() == whole.is_conj()
    if not same_elements or not whole.is_contiguous() or whole.shape != source.shape:
        return _refuse_again(name), no_way_back(name)
    place = (result.shape, result.stride(), result.storage_offset() - whole.storage_offset())

    def again() -> DistTensor:
        taken = source.replicated().local.contiguous().as_strided(*place)
        return as_distributed(taken, source.grid).redistribute(dist)

    def put_back(view: DistTensor) -> None:
        fresh = source.replicated().local.clone(memory_format=torch.contiguous_format)
        fresh.as_strided(*place).copy_(view.replicated().local)
        source.copy_(as_distributed(fresh, source.grid))

    return again, put_back


def _refuse_again(name: str) -> Callable[[], DistTensor]:
    """Return a function that raises because the view cannot be taken again."""

    def refuse() -> DistTensor:
        raise UnsupportedOperation(
            f"a result of {name}, which shares memory with its argument in torch, after a change of that in place: "
            f"it is a copy; call {name} after the change"
        )

    return refuse


def _distributed(result: torch.Tensor, arguments: Sequence[_Gathered], dims: Sequence[int] | None) -> DistTensor:
    """Return ``result`` split as an argument of its shape is; if only ``dims`` were gathered, as the input is."""
    first = arguments[0].part
    if dims is None or not first.dist.split_axes:
        y = as_distributed(result, first.grid)
    elif result.dim() == first.dim():
        shape = torch.Size(result.shape[d] if d in dims else n for d, n in enumerate(first.shape))
        y = DistTensor(result, first.dist, shape)
        if shape != arguments[0].given.shape:
            return y.redistribute(arguments[0].given.dist.balanced())
    else:
        left = [d for d in range(first.dim()) if d not in dims]
        axes = [first.dist.axes[d] for d in left]
        y = DistTensor(result, first.dist.with_axes(axes), torch.Size(first.shape[d] for d in left))
    alike = [argument.given.dist for argument in arguments if argument.given.shape == y.shape]
    if dims is None and not alike:
        matching = (matching_distribution(argument.given, y.shape) for argument in arguments)
        alike = [dist for dist in matching if dist.split_axes]
    return y.redistribute(alike[0] if alike else y.dist)
