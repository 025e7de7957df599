"""Strides that a tensor would have in a single process.

Random numbers are drawn in the order of memory, and views depend on strides, so a DistTensor stores the strides of the
full tensor if it is not contiguous. They are found by torch itself: :func:`propagate_strides` repeats a call with meta
tensors, which have shapes and strides but no memory. ``DistTensor.__torch_function__`` calls it after each operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from distconv.dispatch import OperatorKind, StridePolicy, rule_of
from distconv.memory_format import memory_format

_PLAIN = frozenset((int, float, bool, str, type(None)))
"""Types of most other arguments; they are their own keys."""


class TensorKey(NamedTuple):
    """The properties of a tensor argument on which the shape and the strides of a result depend.

    Parameters
    ----------
    shape : tuple of int
        Global shape.
    strides : tuple of int or None
        Strides in a single process; None for those of a contiguous tensor.
    dtype : torch.dtype
    device : str
        Device type: some GPU kernels return other strides than the CPU's.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: str = ""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKey:
        """Return the key of ``tensor``.

        Parameters
        ----------
        tensor : Tensor
            DistTensor or plain tensor.

        Returns
        -------
        TensorKey
        """
        return cls(tensor.shape, _strides_of(tensor), tensor.dtype, tensor.device.type)

    def meta_tensor(self) -> torch.Tensor:
        """Return a meta tensor with these properties."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class _Outcome(NamedTuple):
    """The strides of each tensor of a result (None if contiguous), and True if the result is the first argument."""

    strides: tuple[tuple[int, ...] | None, ...]
    is_first: bool


def propagate_strides(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Give the results of a call the strides that they have in a single process.

    Parameters
    ----------
    function, args, kwargs
        The call.
    result : object
        What the distributed operator returned.

    Returns
    -------
    object
        ``result`` with strides set, or the first argument if torch returns that.
    """
    rule = rule_of(function)
    new = rule is not None and rule.order is StridePolicy.NEW
    # The common case, without a call of torch: contiguous operands give a contiguous result unless the rule says NEW.
    if not (new or _has_noncontiguous(args) or (kwargs and _has_noncontiguous(kwargs.values()))):
        return result
    if rule is not None and rule.kind is OperatorKind.VIEW and _set_strides_of_views(args[0] if args else None, result):
        return result
    outcome = _outcome_of_call(function, args, kwargs)
    first: Any = args[0] if args else None
    if outcome.is_first and result is first:
        return result  # Operators that change dimensions in place set the strides themselves.
    # Such as contiguous(): torch returns the argument itself or a copy, depending on strides. A caller notices which of
    # them when one is changed in place.
    if outcome.is_first != (result is first) and isinstance(result, torch.Tensor) and hasattr(result, "_strides"):
        if outcome.is_first and type(first) is type(result) and first.shape == result.shape:
            return first
        if result is first:
            result = type(result)(result.local.clone(), result.dist, result.shape)
    for tensor, strides in zip(_tensors(result), outcome.strides, strict=False):
        # If the shape depends on values (x[mask]), the assumed outcome may have a different number of dimensions.
        if hasattr(tensor, "_strides") and (strides is None or len(strides) == tensor.dim()):
            tensor._set_layout(tensor.dist, tensor.shape, strides)
            if tensor is not first and (rule is None or rule.kind is not OperatorKind.VIEW):
                _convert_block(tensor)
    return result


def _convert_block(tensor: Any) -> None:
    """Copy the block of a new channels-last tensor into that memory format, unless its operator has kept the format.

    Otherwise each of the following operators would convert a block: a kernel computes in the format of its operands.
    """
    block = tensor._local
    # The block first, since most operators keep the format: a meta tensor for each result would take microseconds.
    if tensor._strides is None or not block.numel() or memory_format(block) is not torch.contiguous_format:
        return
    wanted = memory_format(empty_like_global(tensor, device="meta"))
    if wanted is not torch.contiguous_format:
        tensor.local = block.contiguous(memory_format=wanted)


def has_own_strides(tensor: Any) -> bool:
    """Return True if the block of a DistTensor has the strides that the tensor has in a single process.

    Parameters
    ----------
    tensor : object
        DistTensor.

    Returns
    -------
    bool
    """
    return bool(noncontiguous_strides(tensor._local) == tensor._strides)


def noncontiguous_strides(block: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a plain tensor; None if it is contiguous or has no strides.

    An image of one pixel is contiguous in both memory formats. Its strides tell in which format convolution and
    interpolation return their results, so those of channels_last are returned.

    Parameters
    ----------
    block : Tensor
        Plain tensor.

    Returns
    -------
    tuple of int or None
    """
    if block.layout != torch.strided:
        return None
    contiguous = block.is_contiguous() and (block.dim() not in (4, 5) or block.stride(-1) == 1)
    return None if contiguous else block.stride()


def _set_strides_of_views(source: Any, result: Any) -> bool:
    """Set the strides of views on a grid of one rank to those of their blocks.

    Return False, and set nothing, unless all of ``result`` are views of ``source`` and ``source`` has its block's
    strides.
    """
    # Over several ranks the strides of a block are those of its own shape, not of the global one.
    if not hasattr(source, "_strides") or source.dist.grid.size > 1 or not has_own_strides(source):
        return False
    views = [tensor for tensor in _tensors(result) if hasattr(tensor, "_strides")]
    # Compared by memory: only a view of the block has the strides of a view in a single process.
    memory = source._local.untyped_storage().data_ptr()
    if any(view is source or view._local.untyped_storage().data_ptr() != memory for view in views):
        return False
    for view in views:
        view._set_layout(view.dist, view.shape, noncontiguous_strides(view._local))
    return True


def _has_noncontiguous(values: Iterable[Any]) -> bool:
    """Return True if an argument indicates that a result may not be contiguous."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if _strides_of(value) is not None:
                return True
        elif isinstance(value, torch.memory_format) or (isinstance(value, (list, tuple)) and _has_noncontiguous(value)):
            return True
    return False


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    if hasattr(tensor, "_strides"):
        return tensor._strides  # type: ignore[no-any-return]
    return noncontiguous_strides(tensor)


def _outcome_of_call(function: Callable[..., Any], args: Any, kwargs: Any) -> _Outcome:
    key = (function, _to_key(args), tuple((name, _to_key(value)) for name, value in kwargs.items()))
    # torch's own functions on meta tensors: they compute no values, and send no messages.
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        try:
            return _compute_outcome_cached(*key)
        except TypeError:  # something that cannot be hashed
            return _compute_outcome(*key)


def key_function(of: Callable[[torch.Tensor], TensorKey]) -> Callable[[Any], Any]:
    """Return a function that converts arguments of calls to cache keys.

    Parameters
    ----------
    of : callable
        Converts a tensor to its :class:`TensorKey`.

    Returns
    -------
    callable
        Converts tensors, and tuples, lists and slices with tensors.
    """

    def to_key(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return of(value)
        if isinstance(value, tuple):
            return tuple(map(to_key, value))
        if isinstance(value, list):  # as an index it is not a tuple
            return ("list", *map(to_key, value))
        return ("slice", value.start, value.stop, value.step) if isinstance(value, slice) else value

    return to_key


_to_key = key_function(TensorKey.of)


def restore_arguments(value: Any, make: Callable[[TensorKey], torch.Tensor]) -> Any:
    """Convert a key of :func:`key_function` back to arguments.

    Parameters
    ----------
    value : object
        The key.
    make : callable
        Makes a tensor of a :class:`TensorKey`.

    Returns
    -------
    object
        The arguments.
    """
    if isinstance(value, TensorKey):
        return make(value)
    if isinstance(value, tuple):
        if value[:1] == ("list",):
            return [restore_arguments(v, make) for v in value[1:]]
        return slice(*value[1:]) if value[:1] == ("slice",) else tuple(restore_arguments(v, make) for v in value)
    return value


def has_any(value: Any, test: Callable[[TensorKey], bool]) -> bool:
    """Return True if a tensor in a key passes ``test``.

    Parameters
    ----------
    value : object
        Key, possibly nested in tuples.
    test : callable
        Condition on the key of a tensor.

    Returns
    -------
    bool
    """
    if isinstance(value, TensorKey):
        return test(value)
    return isinstance(value, tuple) and any(has_any(v, test) for v in value)


def _compute_outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> _Outcome:
    operands: list[torch.Tensor] = []

    def make(key: TensorKey) -> torch.Tensor:
        # Under autocast a half-precision input meets float32 weights, which meta tensors reject. Strides do not depend
        # on the precision.
        half = key.dtype in (torch.bfloat16, torch.float16)
        operands.append((key._replace(dtype=torch.float32) if half else key).meta_tensor())
        return operands[-1]

    given = restore_arguments(args, make)
    named = {name: restore_arguments(value, make) for name, value in kwargs}
    try:
        results = function(*given, **named)
    except Exception:  # the result depends on values, or meta tensors are unsupported: assume an elementwise function
        results = torch.empty_like(operands[0])
    rule, on_gpu = rule_of(function), has_any((args, kwargs), lambda tensor: tensor.device == "cuda")
    order = StridePolicy.KEPT if rule is None else rule.order
    # The third argument of torch.nn.functional.pad is the mode.
    on_cpu = order is StridePolicy.OF_INPUT_ON_CPU and not on_gpu and "circular" not in (*given[2:3], named.get("mode"))
    if order is StridePolicy.OF_INPUT or on_cpu:
        results = torch.empty_like(results, memory_format=_memory_format(operands[:1]))
    elif order is StridePolicy.OF_LAYER:
        # cuDNN returns contiguous results of float64 convolutions.
        is_contiguous = on_gpu and torch.float64 in (x.dtype for x in operands)
        if rule is not None and not on_gpu and isinstance(results, torch.Tensor) and results.dim() == 5:
            is_contiguous = _is_contiguous_convolution(rule.operator, args, kwargs)
        results = torch.empty_like(
            results, memory_format=torch.contiguous_format if is_contiguous else _memory_format(operands[:2])
        )
    elif order is StridePolicy.IN_TRAINING and (named.get("training") or any(given[3:4])) and results is not given[0]:
        results = results if on_gpu else torch.empty(results.shape, device="meta")
    strides = tuple(noncontiguous_strides(t) for t in _tensors(results))
    return _Outcome(strides, bool(given) and results is given[0])


def _is_contiguous_convolution(operator: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return True if torch computes a 3-D convolution on a CPU by a kernel whose results are always contiguous.

    Of the CPU's kernels only those of oneDNN keep channels-last. torch chooses one by dtype, sizes and threads.
    """

    def without_memory(value: Any) -> Any:
        return restore_arguments(value, lambda key: torch.empty((), dtype=key.dtype).expand(key.shape))

    bound = inspect.signature(operator).bind(*without_memory(args), **{k: without_memory(v) for k, v in kwargs})
    bound.apply_defaults()
    options = {name: [v] * 3 if isinstance(v, int) else v for name, v in bound.arguments.items()}
    padding = [0] * 3 if isinstance(options["padding"], str) else options["padding"]
    transposed = "output_padding" in options
    backend = torch._C._select_conv_backend(
        options["input"], options["weight"], None, options["stride"], padding, options["dilation"], transposed,
        options.get("output_padding", [0] * 3), bound.arguments["groups"],
    )  # fmt: skip
    return str(backend).rpartition(".")[2] in ("Slow3d", "SlowDilated3d", "SlowTranspose3d")


_compute_outcome_cached = lru_cache(maxsize=4096)(_compute_outcome)


def _memory_format(meta_tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    """Return the memory format, other than contiguous, that any of the meta tensors has; else contiguous."""
    formats = {torch._prims_common.suggest_memory_format(t) for t in meta_tensors if t.dim() in (4, 5)}
    return (formats - {torch.contiguous_format} or {torch.contiguous_format}).pop()


def _tensors(result: Any) -> Iterator[Any]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors(each)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``.

    Parameters
    ----------
    shape : tuple of int
        Sizes of the dimensions.

    Returns
    -------
    tuple of int
    """
    return torch.empty(shape, device="meta").stride()


def can_view_as(tensor: Any, shape: tuple[int, ...]) -> bool:
    """Return True if ``tensor.view(shape)`` is possible in a single process; ``tensor`` is a DistTensor.

    Parameters
    ----------
    tensor : object
        DistTensor.
    shape : tuple of int
        Sizes of the view, without -1.

    Returns
    -------
    bool
    """
    if tensor._strides is None:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return _can_view(TensorKey.of(tensor), tuple(shape))


@lru_cache(maxsize=4096)
def _can_view(tensor: TensorKey, shape: tuple[int, ...]) -> bool:
    try:
        tensor.meta_tensor().view(shape)
    except RuntimeError:
        return False
    return True


def empty_like_global(tensor: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Return an uninitialized plain tensor with the global shape and strides of a DistTensor.

    Parameters
    ----------
    tensor : DistTensor
        DistTensor.
    dtype, device : optional
        As in ``torch.empty`` (default: those of ``tensor``).

    Returns
    -------
    Tensor
    """
    options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
    if tensor._strides is None:
        return torch.empty(tensor.shape, **options)
    return torch.empty_strided(tensor.shape, tensor._strides, **options)
