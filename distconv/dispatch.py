"""The operator registry: which distributed operator implements which torch function.

``distconv.layers`` fills the registry; ``DistTensor.__torch_function__`` calls :func:`dispatch_call`. A function
without an operator goes to the exact fallback, which computes it replicated, or raises. No function ever runs on the
local blocks by default. An operator with its properties is a rule (:class:`OperatorRule`); :class:`NoRule` sends a call
to the fallback. A call takes the first path that applies::

    1  grid of one rank, values only    torch's own function on the block     call_on_single_rank
    2  operator registered              the distributed operator              dispatch_call
    3  torch function in Python         its body, on DistTensors              python_body
    4  otherwise                        replicated computation, or an error   call_fallback
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import chain, repeat
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map

from distconv.errors import DistconvError, MismatchError, NoRule, UnsupportedOperation
from distconv.process.call_stack import layer_name, running_modules

Operator = Callable[..., Any]
F = TypeVar("F", bound=Operator)


class OperatorKind(Enum):
    """Category of a torch function: its effects other than computing a result."""

    VALUES = "computes values only; on a grid of one rank torch's own function runs instead of the operator"
    VIEW = "returns a view of an argument; the operator records that they share memory"
    QUERY = "returns a property of the tensor"
    EFFECT = "has side effects: draws random numbers, modifies autograd's graph or an optimizer"


class StridePolicy(Enum):
    """Rule for the strides that a result has in a single process. See ``distconv.memory_order``.

    "As torch returns" refers to a call of torch's function with meta tensors.
    """

    KEPT = "contiguous if all operands are, otherwise as torch returns"
    NEW = "always as torch returns: contiguous operands may give a result that is not contiguous"
    OF_INPUT = "the memory format of the input, where meta tensors give contiguous"
    OF_INPUT_ON_CPU = "OF_INPUT on a CPU, except for circular padding, which consists of slices"
    OF_LAYER = "channels-last if the input or the weight is"
    IN_TRAINING = "contiguous in training on a CPU, where meta tensors give other strides"


class OperatorRule(NamedTuple):
    """An operator and the properties of the torch functions that it implements.

    Parameters
    ----------
    operator : callable
        Takes the arguments of the torch functions.
    kind : OperatorKind
        What the functions do.
    order : StridePolicy
        How the strides that the results have in a single process are determined.
    tensors : str or None
        Names of the parameters that may be tensors, separated by spaces; ``*`` stands for further positional arguments.
        All other parameters are numbers, such as sizes, dimensions and factors. ``""`` is the first parameter only, and
        None is all parameters.
    passes : int or None
        How often the input is read, from which costs are estimated. None if memory traffic does not determine the cost.
    """

    operator: Operator
    kind: OperatorKind = OperatorKind.VALUES
    order: StridePolicy = StridePolicy.KEPT
    tensors: str | None = ""
    passes: int | None = 1


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
"""Functions that torch computes from the wrapper itself, without an operator."""

_RULES: dict[object, OperatorRule] = {}
_FALLBACK: list[Operator] = []
_SINGLE_RANK: list[Operator] = []


def implements(
    *functions: object,
    kind: OperatorKind = OperatorKind.VALUES,
    order: StridePolicy = StridePolicy.KEPT,
    tensors: str | None = "",
    passes: int | None = 1,
) -> Callable[[F], F]:
    """Register the decorated operator for torch functions.

    Parameters
    ----------
    *functions : object
        The torch functions. Two names of one function may both be given.
    kind, order, tensors, passes
        As in :class:`OperatorRule`.

    Returns
    -------
    callable
        A decorator, which returns the operator unchanged.

    Raises
    ------
    AssertionError
        If a function already has an operator: one of the two would never be called.
    """

    def register(operator: F) -> F:
        rule = OperatorRule(operator, kind, order, tensors, passes)
        # torch has some functions under several names; a name may be listed with an alias.
        for function in set(functions):
            assert function not in _RULES, f"{name_of(function)} already has the operator {_RULES[function].operator}"
            _RULES[function] = rule
        return operator

    return register


def rules() -> dict[object, OperatorRule]:
    """Return all functions that have an operator, with their rules."""
    return dict(_RULES)


def rule_of(function: object) -> OperatorRule | None:
    """Return the rule of ``function``, or None if it has no operator.

    Parameters
    ----------
    function : object
        Function, method or property getter of torch.

    Returns
    -------
    OperatorRule or None
    """
    return _RULES.get(function)


def has_operator(function: object) -> bool:
    """Return True if ``function`` has an operator.

    Parameters
    ----------
    function : object
        Function, method or property getter of torch.

    Returns
    -------
    bool
    """
    return function in _RULES


def operator_for(function: object) -> Operator:
    """Return the distributed operator for ``function``.

    Parameters
    ----------
    function : object
        Function, method or property getter of torch.

    Returns
    -------
    Operator

    Raises
    ------
    NoRule
        If it has none.
    """
    return _rule(function).operator


def _rule(function: object) -> OperatorRule:
    rule = _RULES.get(function)
    if rule is None:
        raise NoRule(
            f"{name_of(function)} has no distributed rule; write it with operators that have one, or gather the tensor "
            "once (dc.gather(x)) where several such calls follow each other"
        )
    return rule


def register_fallback(operator: F) -> F:
    """Register the decorated function for calls without a rule.

    Parameters
    ----------
    operator : callable
        Called with the error, the torch function, its positional and its keyword arguments.

    Returns
    -------
    callable
        ``operator``.
    """
    _FALLBACK[:] = [operator]
    return operator


def register_single_rank(operator: F) -> F:
    """Register the decorated function for calls on grids of one rank.

    Parameters
    ----------
    operator : callable
        Called with the torch function, its positional and its keyword arguments.

    Returns
    -------
    callable
        ``operator``.
    """
    _SINGLE_RANK[:] = [operator]
    return operator


def call_on_single_rank(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function on blocks if the grid has one rank and the function only computes values.

    Parameters
    ----------
    function, args, kwargs
        The call, as ``__torch_function__`` receives it.

    Returns
    -------
    object
        The result, with the strides of a single process; ``NotImplemented`` if the call needs a distributed operator.
    """
    rule = _RULES.get(function)
    if rule is None or rule.kind is not OperatorKind.VALUES:
        return NotImplemented
    return _SINGLE_RANK[0](function, args, kwargs)


def dispatch_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the operator for a torch function, or the exact fallback if no rule covers the arguments.

    Collective: call on every rank. A function that torch implements in Python runs that implementation, whose calls are
    dispatched in turn.

    Parameters
    ----------
    function, args, kwargs
        The call, as ``__torch_function__`` receives it.

    Returns
    -------
    object
        The result, with DistTensors in place of tensors.

    Raises
    ------
    UnsupportedOperation
        If neither a rule nor the fallback covers the call.
    """
    # A rule has priority over torch's own body.
    body = None if function in _RULES else python_body(function)
    if body is not None:
        return body(*args, **kwargs)
    try:
        rule = _rule(function)
        if rule.kind is OperatorKind.VALUES and _is_without_elements(args, kwargs):
            return _FALLBACK[0](None, function, args, kwargs)
        return _by_rule(function, rule, args, kwargs)
    except NoRule as error:
        reason = error
    # Outside of the except block, so that an error here is not reported as one in the handling of NoRule.
    return call_fallback(reason, function, args, kwargs)


def _is_without_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the first distributed tensor has no elements.

    Results and errors of torch functions are special then, and computing them replicated costs nothing.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        shape = getattr(value, "_shape", None)
        if shape is not None:
            return 0 in shape
    return False


_PYTHON_MODULES = frozenset(("torch.nn.functional", "torch.functional"))
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def python_body(function: Callable[..., Any]) -> Operator | None:
    """Return the Python implementation of a torch function, without its check for ``__torch_function__``.

    Because of this check torch dispatched the call to distconv. In the returned copy the check always returns False;
    otherwise the same call would be dispatched again without end. A function that leaves the check to another function
    (``torch.meshgrid``) cannot be copied so, and counts as not written in Python.

    Parameters
    ----------
    function : callable
        Function of torch that is written in Python.

    Returns
    -------
    callable or None
        None if torch does not implement ``function`` in Python, or the function does not contain the check.
    """
    if not isinstance(function, FunctionType) or function.__module__ not in _PYTHON_MODULES:
        return None
    return _without_override_checks(function)


@lru_cache(maxsize=256)
def _without_override_checks(function: FunctionType) -> Operator | None:
    if not set(_OVERRIDE_CHECKS).intersection(function.__code__.co_names):
        return None
    # The body's own check would dispatch to DistTensor again, without end.
    disabled_checks = dict.fromkeys(_OVERRIDE_CHECKS, lambda *tensors: False)
    code, names = function.__code__, {**function.__globals__, **disabled_checks}
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _by_rule(function: Callable[..., Any], rule: OperatorRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    operator = rule.operator
    # The operator would ignore it, and `out` would keep its old values.
    if kwargs.get("out") is not None and "out" not in _parameters(operator):
        raise NoRule(f"{name_of(function)} with out= has no distributed rule; assign the result instead")
    if _has_numpy_scalar(args) or _has_numpy_scalar(kwargs.values()):
        args, kwargs = _with_numbers(rule, args, kwargs)
    try:
        return operator(*args, **kwargs)
    except TypeError:
        # torch may have further signatures, for which the operator has no parameters: those go to the fallback.
        if _accepts(operator, args, kwargs):
            raise
    named = ", ".join(f"{name}=" for name in kwargs)
    raise NoRule(f"{name_of(function)} has no distributed rule with these arguments ({named}); call it without some")


# Arguments of these types need no conversion, so that the common call is checked quickly.
_PLAIN = frozenset((int, float, bool, str, type(None), slice, type(Ellipsis), torch.Size, torch.dtype))


def _has_numpy_scalar(values: Iterable[Any]) -> bool:
    """Return True if ``values``, or a sequence in it, may contain a number that is not one of Python's."""
    return any(
        type(v) not in _PLAIN and (_is_number(v) or (type(v) in (list, tuple) and _has_numpy_scalar(v))) for v in values
    )


def _is_number(value: Any) -> bool:
    # A result of a recorded operation remains a tensor: a number would have no gradient.
    return isinstance(value, np.generic) or (type(value) is torch.Tensor and not value.dim() and value.is_leaf)


def _with_numbers(rule: OperatorRule, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace NumPy scalars, and 0-d plain tensors where the operator takes no tensor, by Python numbers.

    torch accepts all three as a size, a dimension or a factor.
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
def _number_parameters(rule: OperatorRule) -> tuple[list[bool], dict[str, bool], bool]:
    """Return True for parameters that take numbers and no tensors: by position, by name, and for any others."""
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


def _accepts(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(operator).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def call_fallback(error: NoRule, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call without a rule, computed replicated.

    Collective: call on every rank.

    Parameters
    ----------
    error : NoRule
        The reason, which a ReplicationWarning or an error shows.
    function, args, kwargs
        The call.

    Returns
    -------
    object
        The result, with replicated DistTensors.

    Raises
    ------
    UnsupportedOperation
        For functions of ``torch.distributed``, which modify a tensor in place: they would modify a gathered copy. Also
        if the fallback rejects the call.
    """
    if f"{getattr(function, '__module__', '')}.".startswith("torch.distributed."):
        raise UnsupportedOperation(
            f"{name_of(function)} does not take a DistTensor. A loss or a sum of DistTensors is already the "
            "same on all ranks; pass x.local for this rank's block, or dc.gather(x) for the full tensor"
        )
    return _FALLBACK[0](error, function, args, kwargs)


def map_leaves(change: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to all leaves of nested tuples, lists and dictionaries.

    A ``torch.Size`` is one leaf: as a plain tuple it would be taken for data.

    Parameters
    ----------
    change : callable
        Called with each leaf.
    values : object
        The nested values.

    Returns
    -------
    object
        The same structure with the results of ``change``.
    """
    # A torch.Size is a tuple, too: as a tree it would become a plain one.
    return tree_map(change, values, is_leaf=lambda value: isinstance(value, torch.Size))


def functions_named(name: str, *holders: Any) -> set[Any]:
    """Return the functions of this name in torch's modules and classes.

    Submodules, and methods that a module has as a Python object, are left out: ``torch.cpu`` is a module, and
    ``torch.__eq__`` compares modules.

    Parameters
    ----------
    name : str
        Name of a function or a method.
    *holders
        Modules and classes.

    Returns
    -------
    set
        Each function once, even if several holders have it.
    """
    found = (
        vars(holder).get(name) if isinstance(holder, ModuleType) else getattr(holder, name, None) for holder in holders
    )
    return {function for function in found if callable(function)}


def name_of(function: object) -> str:
    """Return the name under which users call ``function``, such as ``torch.nn.functional.conv2d``.

    Parameters
    ----------
    function : object
        Function, method or property getter of torch.

    Returns
    -------
    str
    """
    path = (torch.overrides.resolve_name(function) or "").replace("._VariableFunctionsClass.", ".")
    # Not repr(): it contains an address, which differs between ranks, and all ranks must raise the same message.
    own = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return path or own.replace("None._VariableFunctionsClass.", "torch.").lstrip(".")


@lru_cache(maxsize=1024)
def short_name(function: object) -> str:
    """Return the last part of the name of ``function``, such as ``conv2d``.

    Parameters
    ----------
    function : object
        Function, method or property getter of torch.

    Returns
    -------
    str
    """
    return name_of(function).removesuffix(".__get__").rpartition(".")[2]


# -- layers -----------------------------------------------------------------------------------------------------------


def add_layer_name(error: DistconvError) -> None:
    """Prefix the message of ``error`` with the layer that is being called.

    Users search for layers, not for functions. Errors that name the layers of all ranks stay unchanged.

    Parameters
    ----------
    error : DistconvError
        Error that leaves the operator of a layer.
    """
    # A message that names the layers of all ranks must stay identical on all ranks.
    if error.args and not (isinstance(error, MismatchError) and error.names_calls):
        error.args = (with_layer(str(error.args[0])), *error.args[1:])


def with_layer(message: str) -> str:
    """Return ``message`` with the name of the layer that is being called in front.

    The layer is found on the call stack, so that calls that succeed cost nothing. Its name is the one in
    ``named_modules()`` of the outermost module. Outside of all modules the message is returned unchanged.

    Parameters
    ----------
    message : str
        Message of an error or a warning.

    Returns
    -------
    str
    """
    modules = running_modules()
    if not modules:
        return message
    prefix = f"{layer_name(modules)}: "
    # The error passes through every operator on the stack, so the prefix may be there already.
    return message if message.startswith(prefix) else prefix + message
