"""Strides that a tensor would have in one process: random numbers are drawn in that order, and views depend on it.

A DistTensor carries them where they are not those of a contiguous tensor. They follow from torch itself: what has been
called is called again with tensors that have shapes and strides, but no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from distconv.dispatch import Kind, Order, rule_of

_PLAIN = frozenset((int, float, bool, str, type(None)))
"""What most other arguments are."""


class Frozen(NamedTuple):
    """A tensor in the key of a call: what its result's shape and strides depend on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None: those of a contiguous one."""
    dtype: torch.dtype
    device: str = ""
    """Its kind: some kernels of a GPU make other strides."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Frozen:
        """Return the key of ``tensor``."""
        return cls(tensor.shape, _strides_of(tensor), tensor.dtype, tensor.device.type)

    def twin(self) -> torch.Tensor:
        """Return such a tensor without memory."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class _Outcome(NamedTuple):
    """What a call gives: the strides of each tensor, None for contiguous ones; whether it is the first argument."""

    strides: tuple[tuple[int, ...] | None, ...]
    is_first: bool


def follow(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """``result`` of a call, with the strides that it has in one process."""
    rule = rule_of(function)
    new = rule is not None and rule.order is Order.NEW
    if not (new or _unusual(args) or (kwargs and _unusual(kwargs.values()))):
        return result
    if rule is not None and rule.kind is Kind.VIEW and _views_of_one_rank(args[0] if args else None, result):
        return result
    outcome = _outcome(function, args, kwargs)
    first: Any = args[0] if args else None
    if outcome.is_first and result is first:
        return result  # What changes a tensor's dimensions in place sees to its strides.
    if outcome.is_first != (result is first) and isinstance(result, torch.Tensor) and hasattr(result, "_strides"):
        if outcome.is_first and type(first) is type(result) and first.shape == result.shape:
            return first
        if result is first:
            result = type(result)(result.local.clone(), result.dist, result.shape)
    for tensor, strides in zip(_tensors(result), outcome.strides, strict=False):
        # Where values decide the shape (x[mask]) it may have other dimensions than was taken for granted.
        if hasattr(tensor, "_strides") and (strides is None or len(strides) == tensor.dim()):
            tensor._lay_out(tensor.dist, tensor.shape, strides)
    return result


def has_own_strides(tensor: Any) -> bool:
    """Whether the block of a DistTensor has the strides that the tensor has in one process."""
    return bool(own_strides(tensor._local) == tensor._strides)


def own_strides(block: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides, None for those of a contiguous one, and where there are none."""
    return None if block.layout != torch.strided or block.is_contiguous() else block.stride()


def _views_of_one_rank(source: Any, result: Any) -> bool:
    """Whether ``result`` is views of ``source`` on a grid of one rank, which get the strides that their blocks have."""
    if not hasattr(source, "_strides") or source.dist.grid.size > 1 or not has_own_strides(source):
        return False
    views = [tensor for tensor in _tensors(result) if hasattr(tensor, "_strides")]
    memory = source._local.untyped_storage().data_ptr()
    if any(view is source or view._local.untyped_storage().data_ptr() != memory for view in views):
        return False
    for view in views:
        view._lay_out(view.dist, view.shape, own_strides(view._local))
    return True


def _unusual(values: Iterable[Any]) -> bool:
    """Whether any value says that a result may not be contiguous."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if _strides_of(value) is not None:
                return True
        elif isinstance(value, torch.memory_format) or (isinstance(value, (list, tuple)) and _unusual(value)):
            return True
    return False


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    if hasattr(tensor, "_strides"):
        return tensor._strides  # type: ignore[no-any-return]
    return own_strides(tensor)


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> _Outcome:
    key = (function, _frozen(args), tuple((name, _frozen(value)) for name, value in kwargs.items()))
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        try:
            return _cached(*key)
        except TypeError:  # something that cannot be hashed
            return _worked_out(*key)


def freezing(of: Callable[[torch.Tensor], Frozen]) -> Callable[[Any], Any]:
    """Return a function that makes keys of caches from arguments of calls, in which ``of`` stands for a tensor."""

    def frozen(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return of(value)
        if isinstance(value, tuple):
            return tuple(map(frozen, value))
        if isinstance(value, list):  # as an index it is not a tuple
            return ("list", *map(frozen, value))
        return ("slice", value.start, value.stop, value.step) if isinstance(value, slice) else value

    return frozen


_frozen = freezing(Frozen.of)


def thawed(value: Any, make: Callable[[Frozen], torch.Tensor]) -> Any:
    """Return the arguments of which :func:`freezing` made ``value``, with the tensors that ``make`` gives."""
    if isinstance(value, Frozen):
        return make(value)
    if isinstance(value, tuple):
        if value[:1] == ("list",):
            return [thawed(v, make) for v in value[1:]]
        return slice(*value[1:]) if value[:1] == ("slice",) else tuple(thawed(v, make) for v in value)
    return value


def has_any(value: Any, test: Callable[[Frozen], bool]) -> bool:
    """Return True if a tensor among frozen arguments passes ``test``."""
    if isinstance(value, Frozen):
        return test(value)
    return isinstance(value, tuple) and any(has_any(v, test) for v in value)


def _worked_out(function: Callable[..., Any], args: Any, kwargs: Any) -> _Outcome:
    twins: list[torch.Tensor] = []

    def twin(of: Frozen) -> torch.Tensor:
        twins.append(of.twin())
        return twins[-1]

    given, named = thawed(args, twin), {name: thawed(value, twin) for name, value in kwargs}
    try:
        results = function(*given, **named)
    except Exception:  # values decide, or a device: then as for a function element by element
        results = torch.empty_like(twins[0])
    rule, on_gpu = rule_of(function), has_any((args, kwargs), lambda tensor: tensor.device == "cuda")
    order = Order.KEPT if rule is None else rule.order
    on_cpu = order is Order.OF_INPUT_ON_CPU and not on_gpu and "circular" not in (*given[2:3], named.get("mode"))
    if order is Order.OF_INPUT or on_cpu:
        results = torch.empty_like(results, memory_format=_format(twins[:1]))
    elif order is Order.OF_LAYER:
        # cuDNN convolves float64 in contiguous memory alone.
        alone = on_gpu and torch.float64 in (twin.dtype for twin in twins)
        results = torch.empty_like(results, memory_format=torch.contiguous_format if alone else _format(twins[:2]))
    elif order is Order.IN_TRAINING and (named.get("training") or any(given[3:4])) and results is not given[0]:
        results = results if on_gpu else torch.empty(results.shape, device="meta")
    strides = tuple(own_strides(t) for t in _tensors(results))
    return _Outcome(strides, bool(given) and results is given[0])


_cached = lru_cache(maxsize=4096)(_worked_out)


def _format(twins: Sequence[torch.Tensor]) -> torch.memory_format:
    """The memory format that any of ``twins`` has."""
    formats = {torch._prims_common.suggest_memory_format(t) for t in twins if t.dim() in (4, 5)}
    return (formats - {torch.contiguous_format} or {torch.contiguous_format}).pop()


def _tensors(result: Any) -> Iterator[Any]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors(each)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    return torch.empty(shape, device="meta").stride()


def as_view(tensor: Any, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` with the same elements can share the memory of a DistTensor in one process."""
    if tensor._strides is None:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return _fits(Frozen.of(tensor), tuple(shape))


@lru_cache(maxsize=4096)
def _fits(tensor: Frozen, shape: tuple[int, ...]) -> bool:
    try:
        tensor.twin().view(shape)
    except RuntimeError:
        return False
    return True


def unfilled(tensor: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """A plain tensor of unknown values, of the shape and with the strides of the whole ``tensor``."""
    options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
    if tensor._strides is None:
        return torch.empty(tensor.shape, **options)
    return torch.empty_strided(tensor.shape, tensor._strides, **options)
