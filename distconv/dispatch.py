"""The operator registry: which distributed operator serves which torch function, and what is known of that function.

``distconv.layers`` fills it. A function that is not in it goes to the exact fallback, which computes the whole on every
rank, or raises: nothing ever runs on the blocks alone by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import chain, repeat
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from distconv.errors import DistconvError, MismatchError, NoRule, UnsupportedOperation
from distconv.process.call_stack import layer_name, running_modules

Operator = Callable[..., Any]
F = TypeVar("F", bound=Operator)


class Kind(Enum):
    """What a call of a function does."""

    VALUES = "computes values; on a grid of one rank torch's own function does so, and needs no operator"
    VIEW = "shares memory with an argument: the operator keeps track of it"
    QUERY = "says something of a tensor as a whole"
    EFFECT = "does more than compute: draws numbers that ranks agree on, reaches into autograd or optimizers"


class Order(Enum):
    """In which order of memory results lie in one process: see distconv.memory_order."""

    KEPT = "contiguous where all operands are, else as torch's function of tensors without memory says"
    NEW = "as that says in any case: contiguous operands may give other orders"
    OF_INPUT = "that of the input; torch's function of tensors without memory says contiguous"
    OF_INPUT_ON_CPU = "as OF_INPUT on a CPU, but for circular padding, which is made of slices"
    OF_LAYER = "that of the input or the weight, alike"
    IN_TRAINING = "on a CPU contiguous in training, which the same of tensors without memory does not say"


class Rule(NamedTuple):
    """An operator, and what is known of the functions that it serves."""

    operator: Operator
    kind: Kind = Kind.VALUES
    order: Order = Order.KEPT
    tensors: str | None = ""
    """Parameters that may be tensors, in a row, ``*`` for further ones; none: the first; None: all.

    The others are numbers: sizes, dimensions, factors.
    """
    passes: int | None = 1
    """How often its input is read, which is what it costs; None: memory traffic does not describe it."""


METADATA = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "dim", "ndimension", "size", "numel", "nelement", "is_floating_point", "is_complex", "is_signed",
        "element_size", "get_device", "__dir__", "_use_count",
    )
) | frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "layout", "is_cuda", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_nested", "is_mkldnn",
        "is_xla", "is_mps", "is_cpu", "itemsize", "nbytes",
    )
) | frozenset((
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch._has_compatible_shallow_copy_type,
))  # fmt: skip
"""What torch reads off the wrapper itself."""

_RULES: dict[object, Rule] = {}
_FALLBACK: list[Operator] = []
_ON_ONE_RANK: list[Operator] = []


def implements(
    *functions: object,
    kind: Kind = Kind.VALUES,
    order: Order = Order.KEPT,
    tensors: str | None = "",
    passes: int | None = 1,
) -> Callable[[F], F]:
    """Register the decorated operator for these torch functions; it is called with their arguments.

    The rest is said in :class:`Rule`. Two names of one function may both be given. What another operator already serves
    is refused, since one of the two would be dead.
    """

    def register(operator: F) -> F:
        rule = Rule(operator, kind, order, tensors, passes)
        for function in set(functions):
            assert function not in _RULES, f"{name_of(function)} already has the operator {_RULES[function].operator}"
            _RULES[function] = rule
        return operator

    return register


def rules() -> dict[object, Rule]:
    """Every function that has an operator, and what is known of it."""
    return dict(_RULES)


def rule_of(function: object) -> Rule | None:
    """What is known of ``function``; None without an operator."""
    return _RULES.get(function)


def has_operator(function: object) -> bool:
    """Whether ``function`` has an operator."""
    return function in _RULES


def operator_for(function: object) -> Operator:
    """The distributed operator for ``function``.

    Raises
    ------
    NoRule
        If there is none.
    """
    return _rule(function).operator


def _rule(function: object) -> Rule:
    rule = _RULES.get(function)
    if rule is None:
        raise NoRule(
            f"{name_of(function)} has no distributed rule; write it with operators that have one, or gather the tensor "
            "once (dc.gather(x)) where several such calls follow each other"
        )
    return rule


def is_fallback(operator: F) -> F:
    """Let the decorated operator serve the calls that have no rule: it gets the error, the function, its arguments."""
    _FALLBACK[:] = [operator]
    return operator


def serves_one_rank(operator: F) -> F:
    """Let the decorated operator give what functions give on grids of one rank: it gets one and its arguments."""
    _ON_ONE_RANK[:] = [operator]
    return operator


def on_one_rank(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``function`` gives on a grid of one rank, laid out as in one process; NotImplemented where it needs more."""
    rule = _RULES.get(function)
    if rule is None or rule.kind is not Kind.VALUES:
        return NotImplemented
    return _ON_ONE_RANK[0](function, args, kwargs)


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the operator for ``function`` returns, or the exact fallback where it has no rule for these arguments.

    What torch itself writes in Python out of other functions has their rules.
    """
    body = None if function in _RULES else own_body(function)
    if body is not None:
        return body(*args, **kwargs)
    try:
        rule = _rule(function)
        if rule.kind is Kind.VALUES and _is_without_elements(args, kwargs):
            return _FALLBACK[0](None, function, args, kwargs)
        return _by_rule(function, rule, args, kwargs)
    except NoRule as error:
        reason = error
    return fallback(reason, function, args, kwargs)


def _is_without_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the first distributed tensor has no elements.

    What torch's functions return or raise then is special, and calling them on every rank costs nothing.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        shape = getattr(value, "_shape", None)
        if shape is not None:
            return 0 in shape
    return False


_IN_PYTHON = frozenset(("torch.nn.functional", "torch.functional"))
_ASKS_FOR_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def own_body(function: Callable[..., Any]) -> Operator | None:
    """A function of torch's that is written in Python, asking no tensor for an operator of its own.

    It begins by asking, which is how the call has come here: a copy is told that nobody has one. Where another function
    asks for it (``torch.meshgrid``), that would ask again.
    """
    if not isinstance(function, FunctionType) or function.__module__ not in _IN_PYTHON:
        return None
    return _unasking(function)


@lru_cache(maxsize=256)
def _unasking(function: FunctionType) -> Operator | None:
    if not set(_ASKS_FOR_OVERRIDES).intersection(function.__code__.co_names):
        return None
    answers = dict.fromkeys(_ASKS_FOR_OVERRIDES, lambda *tensors: False)
    code, names = function.__code__, {**function.__globals__, **answers}
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _by_rule(function: Callable[..., Any], rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    operator = rule.operator
    if kwargs.get("out") is not None and "out" not in _parameters(operator):
        raise NoRule(f"{name_of(function)} with out= has no distributed rule; assign the result instead")
    if _odd(args) or _odd(kwargs.values()):
        args, kwargs = _with_numbers(rule, args, kwargs)
    try:
        return operator(*args, **kwargs)
    except TypeError:
        # torch may know ways to call it that the rule does not.
        if _takes(operator, args, kwargs):
            raise
    named = ", ".join(f"{name}=" for name in kwargs)
    raise NoRule(f"{name_of(function)} has no distributed rule with these arguments ({named}); call it without some")


_PLAIN = frozenset((int, float, bool, str, type(None), slice, type(Ellipsis), torch.Size, torch.dtype))


def _odd(values: Iterable[Any]) -> bool:
    """Whether there may be a number among ``values``, or in a sequence of them, that is none of Python's."""
    return any(type(v) not in _PLAIN and (_is_number(v) or (type(v) in (list, tuple) and _odd(v))) for v in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.generic) or (type(value) is torch.Tensor and not value.dim() and value.is_leaf)


def _with_numbers(rule: Rule, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """NumPy's numbers as Python's, and so plain tensors of no dimensions where the rule takes no tensor.

    torch takes all three for a size, a dimension or a factor.
    """
    positional, named, others = _number_parameters(rule)
    changed = [_as_number(a, numbers) for a, numbers in zip(args, chain(positional, repeat(others)), strict=False)]
    return tuple(changed), {name: _as_number(value, named.get(name, others)) for name, value in kwargs.items()}


def _as_number(value: Any, tensors: bool) -> Any:
    if isinstance(value, np.generic) or (tensors and _is_number(value)):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_as_number(v, tensors) for v in value)
    return value


@lru_cache(maxsize=1024)
def _number_parameters(rule: Rule) -> tuple[list[bool], dict[str, bool], bool]:
    """Whether its parameters take numbers and no tensors: by position, by name, and any others."""
    if rule.tensors is None:
        return [], {}, False
    parameters = list(inspect.signature(rule.operator).parameters.values())
    tensors = ["out", *(rule.tensors.split() or [parameters[0].name])]
    named = {p.name: p.name not in tensors for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    positional = [named[p.name] for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, named, "*" not in tensors


@lru_cache(maxsize=1024)
def _parameters(operator: Operator) -> frozenset[str]:
    return frozenset(inspect.signature(operator).parameters)


def _takes(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(operator).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def fallback(error: NoRule, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call without a rule, computed replicated; ``error`` gives the reason.

    Raises
    ------
    UnsupportedOperation
        For functions of ``torch.distributed``, which change a tensor in place: they would change a gathered copy.
    """
    if f"{getattr(function, '__module__', '')}.".startswith("torch.distributed."):
        raise UnsupportedOperation(
            f"{name_of(function)} does not take a DistTensor. A loss or a sum of DistTensors is already the "
            "same on all ranks; pass x.local for this rank's block, or dc.gather(x) for the full tensor"
        )
    return _FALLBACK[0](error, function, args, kwargs)


def map_leaves(change: Callable[[Any], Any], values: Any) -> Any:
    """``values``, in whatever tuples, lists and dictionaries, each replaced by what ``change`` makes of it.

    A ``torch.Size`` is one value: as a plain tuple it would be taken for data.
    """
    return tree_map(change, values, is_leaf=lambda value: isinstance(value, torch.Size))


def name_of(function: object) -> str:
    """How users know ``function``."""
    path = (torch.overrides.resolve_name(function) or "").replace("._VariableFunctionsClass.", ".")
    # Never repr(): its address differs between ranks, and all of them raise the same text.
    own = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return path or own.replace("None._VariableFunctionsClass.", "torch.").lstrip(".")


@lru_cache(maxsize=1024)
def short_name(function: object) -> str:
    """The last part of its name: ``conv2d``."""
    return name_of(function).removesuffix(".__get__").rpartition(".")[2]


# -- layers -----------------------------------------------------------------------------------------------------------


def name_layer(error: DistconvError) -> None:
    """Put the layer that is being called in front of the message: people look for layers, not for functions."""
    # Where the layers of all ranks are named, this rank's alone would make the messages of ranks differ.
    if error.args and not (isinstance(error, MismatchError) and error.names_calls):
        error.args = (with_layer(str(error.args[0])), *error.args[1:])


def with_layer(text: str) -> str:
    """``text`` behind the name of the layer that is being called.

    It is found on the call stack, so that calls that succeed pay nothing, and named as in ``named_modules()`` of the
    outermost module. Outside of all modules the message stays as it is.
    """
    modules = running_modules()
    if not modules:
        return text
    prefix = f"{layer_name(modules)}: "
    # An operator may have called others, through each of which the error passes.
    return text if text.startswith(prefix) else prefix + text
