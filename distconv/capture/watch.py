"""What a recording depends on besides values: arguments, modules, what the function refers to, tensors, settings.

Each part says in a sentence what is not any more what it was; nothing if all is. It is asked in each replay, so it
compares what is there with what was, and describes only what differs.
"""

from __future__ import annotations

import dis
import operator
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from distconv.tensor import DistTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OURS = ("torch", "distconv", "builtins")

_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def same(one: Any, other: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal number, text or tuple of such."""
    if one is other:
        return True
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


_DEEP, _MANY = 5, 1000
"""So far down what is in containers and objects is looked at, and of larger containers only how long they are."""


class _Contents:
    """What is in containers and in objects of a user's: a value that :func:`same` finds the same as long as it is."""

    def __init__(self, names: AbstractSet[str] | None = None) -> None:
        self._names = names
        """Attributes that count; all if None."""
        self._seen: set[int] = set()

    def __call__(self, value: Any, depth: int = _DEEP) -> Any:
        parts = self._parts(value) if depth and id(value) not in self._seen else None
        if parts is None:
            return value
        self._seen.add(id(value))
        found = tuple([self(part, depth - 1) for part in parts])
        fixed = isinstance(value, tuple) and all(map(operator.is_, found, parts))
        return value if fixed else (type(value), *found)

    def _parts(self, value: Any) -> Sequence[Any] | None:
        if isinstance(value, torch.Size):
            return None
        if isinstance(value, (Mapping, *_CONTAINERS)):
            if len(value) > _MANY:
                return [len(value)]
            return [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
        if self._names is None:
            attributes: Mapping[str, Any] = vars(value) if _is_plain_object(value) and not _is_ours(type(value)) else {}
            return [*attributes, *attributes.values()] or None
        attributes = _attributes_of(value)
        names = sorted(self._names & attributes.keys())
        return [*names, *(attributes[name] for name in names)] or None


def _attributes_of(value: Any) -> Mapping[str, Any]:
    """Those of an object, a class or a module of a user's."""
    if isinstance(value, ModuleType):
        return {} if value.__name__.partition(".")[0] in _OURS else vars(value)
    if isinstance(value, type):
        return ChainMap(*(vars(each) for each in value.__mro__ if not _is_ours(each)))  # type: ignore[arg-type]
    if isinstance(value, (FunctionType, MethodType, torch.nn.Module, torch.Tensor)) or _is_ours(type(value)):
        return {}
    return ChainMap(getattr(value, "__dict__", {}), _attributes_of(type(value)))  # type: ignore[arg-type]


# -- arguments --------------------------------------------------------------------------------------------------------


def flattened(value: Any) -> Iterator[Any]:
    """What is in lists, tuples and mappings, in order."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for each in value:
            yield from flattened(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from flattened(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of everything in its lists, tuples and mappings."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        mapped_values = [mapped(function, each) for each in value]
        return type(value)(*mapped_values) if hasattr(value, "_fields") else type(value)(mapped_values)
    if isinstance(value, dict):
        return type(value)({key: mapped(function, each) for key, each in value.items()})
    return function(value)


def _structure(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value), *map(_structure, value)
    if isinstance(value, Mapping):
        return type(value), *value, *map(_structure, value.values())
    return None


def block_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.local if isinstance(tensor, DistTensor) else tensor


def place_in_memory(block: torch.Tensor) -> tuple[Any, ...]:
    """What decides which elements an operator meets, and whether it is differentiated."""
    where = (block.shape, block.stride(), block.storage_offset()) if block.layout is torch.strided else (block.shape,)
    return *where, block.dtype, block.device, block.layout, block.requires_grad


def _described(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value.dist, value.shape, value._strides, *place_in_memory(value.local)
    if isinstance(value, torch.Tensor):
        return type(value), *place_in_memory(value)
    return value


class Arguments:
    """Of which shapes, dtypes, strides and distributions the arguments are, and other values."""

    def __init__(self, args: Sequence[Any]) -> None:
        leaves = list(flattened(args))
        self._structure = _structure(args)
        self._nested = any(isinstance(each, (list, tuple, Mapping)) for each in args)
        self._leaves = [_described(leaf) for leaf in leaves]
        self._pattern = _pattern(leaves)

    def difference(self, args: Sequence[Any], leaves: Sequence[Any]) -> str:
        """What is different in ``args``, which has ``leaves``."""
        if len(leaves) != len(self._leaves) or (self._nested and _structure(args) != self._structure):
            return "other arguments"
        for number, (leaf, before) in enumerate(zip(leaves, self._leaves, strict=True)):
            now = _described(leaf)
            if not (now == before if isinstance(leaf, torch.Tensor) else same(now, before)):
                return f"argument {number} is {_shown(now)}, it was {_shown(before)}"
        if _pattern(leaves) != self._pattern:
            return "other arguments are one tensor"
        return ""


def _pattern(leaves: Sequence[Any]) -> list[int]:
    """For each tensor the number of the first one that is the same."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), n) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _shown(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(str(tuple(part) if isinstance(part, torch.Size) else part) for part in parts if part is not None)


# -- what the function refers to --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Reference:
    """A variable, or an attribute, that the function uses."""

    name: str
    holder: Mapping[str, Any] | CellType
    key: str
    value: Any
    read: bool
    """Whether the function reads it; if it only sets it, it is nothing that a recording depends on."""
    names: frozenset[str]
    """Attributes that the function reads of anything."""
    contents: Any = None

    def now(self) -> Any:
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.key)
        try:
            return self.holder.cell_contents
        except ValueError:
            return None

    def keep(self) -> None:
        """What there is now is what it was."""
        self.value = self.now()
        self.contents = _Contents(self.names)(self.value)

    def changed(self) -> bool:
        now = self.now()
        if not same(now, self.value):
            return True
        return self.contents is not self.value and not same(_Contents(self.names)(now), self.contents)


class References:
    """Variables outside of ``function``, and attributes of objects there, that its code names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._found: list[_Reference] = []
        self.values: list[Any] = []
        """Of them, and arguments that are bound to the function."""
        self._seen: set[int] = set()
        self._methods: set[tuple[int, int]] = set()
        """Objects, and functions of their classes."""
        self._look(function)

    def difference(self) -> str:
        """Which of those that are read is another."""
        for each in self._found:
            if each.read and each.changed():
                return f"{each.name} is not what it was"
        return ""

    def set_by_the_step(self) -> str:
        """Which is another, read or not."""
        return next((each.name for each in self._found if each.changed()), "")

    @classmethod
    def of_forwards(cls, modules: Iterable[torch.nn.Module]) -> References:
        """Global variables that the forward passes of modules name."""
        found = cls.__new__(cls)
        found._found = []
        for forward in dict.fromkeys(type(module).forward for module in modules):
            if isinstance(forward, FunctionType) and not _is_ours(forward):
                names = frozenset(_names(forward, "ATTR", "METHOD")[0])
                for name in sorted(_names(forward, "GLOBAL", "NAME")[0] & forward.__globals__.keys()):
                    found._found.append(_Reference(name, forward.__globals__, name, None, True, names))
                    found._found[-1].keep()
        return found

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._method(value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            if not _is_ours(value):
                self._variables(value)
        elif hasattr(value, "func") and hasattr(value, "keywords"):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._note(each)
        elif not isinstance(value, (type, ModuleType, torch.nn.Module)):
            called = getattr(type(value), "__call__", None)  # noqa: B004 - a function with code is looked for
            if isinstance(called, FunctionType):
                self._method(value, called)
        if isinstance(value, torch.nn.Module):
            self.values.append(value)

    def _method(self, owner: Any, function: Any) -> None:
        key = id(owner), id(function)
        if key not in self._methods:
            self._methods.add(key)
            self._look(function)
            self._attributes(owner, function)

    def _note(self, value: Any) -> None:
        self.values.append(value)
        if callable(value):
            self._look(value)

    def _variables(self, function: FunctionType) -> None:
        loaded, stored = _names(function, "GLOBAL", "NAME")
        outer = function.__globals__
        attributes = frozenset(_names(function, "ATTR", "METHOD")[0])
        for name in sorted(loaded | stored):
            if name in outer or name in stored:
                self._add(name, outer, name, name in loaded, attributes)
        defaults = {"": (function.__defaults__, function.__kwdefaults__)}
        self._add("", defaults, f"a default of an argument of {function.__name__}", True, attributes)
        from_cells, _ = _names(function, "DEREF")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, cell, name, name in from_cells, attributes)
        owners = [outer[name] for name in sorted(loaded) if name in outer]
        for owner in (*owners, *map(_contents, function.__closure__ or ())):
            if _is_plain_object(owner):
                self._attributes(owner, function)

    def _attributes(self, owner: Any, function: Any) -> None:
        self.values.append(owner)
        if isinstance(owner, torch.nn.Module):
            return  # It is looked at as a whole.
        loaded, stored = _names(function, "ATTR", "METHOD")
        attributes = ChainMap(getattr(owner, "__dict__", {}), _attributes_of(type(owner)))  # type: ignore[arg-type]
        for name in sorted(stored | (loaded & attributes.keys())):
            self._add(name, attributes, f"{type(owner).__name__}.{name}", name in loaded, frozenset(loaded))
            member = attributes.get(name)
            member = member.fget if isinstance(member, property) else member
            if isinstance(member, FunctionType) and not _is_ours(member):
                self._method(owner, member)

    def _add(
        self, key: str, holder: Mapping[str, Any] | CellType, name: str, read: bool, attributes: frozenset[str]
    ) -> None:
        reference = _Reference(name, holder, key, None, read, attributes)
        reference.keep()
        self._found.append(reference)
        self._note(reference.value)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_ours(what: Any) -> bool:
    """Whether a function or a class is torch's, Python's or of this package: those depend on nothing of a user's."""
    return (what.__module__ or "").partition(".")[0] in _OURS


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a user's, whose attributes count."""
    left_out = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.Tensor)
    return not isinstance(value, left_out) and bool(getattr(value, "__dict__", None))


def _names(function: Any, *kinds: str) -> tuple[set[str], set[str]]:
    """Names that its code, and that of functions in it, reads, and those that it sets, by such instructions.

    A local variable may have the name of a global one, and has nothing to do with it.
    """
    loaded, stored = set(), set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
        for step in dis.get_instructions(code):
            if isinstance(step.argval, str) and any(kind in step.opname for kind in kinds):
                if step.opname.startswith("LOAD_"):
                    loaded.add(step.argval)
                elif step.opname.startswith(("STORE_", "DELETE_")):
                    stored.add(step.argval)
    return loaded, stored


# -- modules and tensors ----------------------------------------------------------------------------------------------


class Modules:
    """Modules that are called: their parameters, buffers, parts, hooks, and attributes such as ``training``."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = list({id(part): part for module in modules for part in module.modules()}.values())
        self._states = [(module, vars(module), *self._state(module)) for module in self.modules]
        own = {id(value): (module, name) for module in self.modules for name, value in _own(module)}
        self._contents = [(module, name, _Contents()(vars(module)[name])) for module, name in own.values()]

    @staticmethod
    def _state(module: torch.nn.Module) -> tuple[list[int], list[Any], list[Any]]:
        attributes = vars(module)
        members = [value for name in (*_MEMBERS, *_HOOKS) for value in (attributes.get(name) or {}).values()]
        return [*map(id, attributes.values()), *map(id, members)], list(attributes.values()), members

    def difference(self) -> str:
        """Which of them has changed, and in what."""
        for module, attributes, ids, values, members in self._states:
            now = [*map(id, attributes.values())]
            for name in (*_MEMBERS, *_HOOKS):
                if attributes.get(name):
                    now += map(id, attributes[name].values())
            if now != ids:
                text = self._named(module, values, members)
                if text:
                    return text
        for module, name, before in self._contents:
            if not same(_Contents()(vars(module)[name]), before):
                return f"{type(module).__name__}.{name} is not what it was"
        return ""

    def _named(self, module: torch.nn.Module, values: list[Any], members: list[Any]) -> str:
        attributes, kind = vars(module), type(module).__name__
        if len(attributes) != len(values):
            return f"{kind} has other attributes"
        for (name, now), before in zip(attributes.items(), values, strict=True):
            if not same(now, before):
                return f"{kind}.{name} is not what it was ({_short(before)} before, {_short(now)} now)"
        now_members = self._state(module)[2]
        if [*map(id, now_members)] != [*map(id, members)]:
            return f"{kind} has other parameters, buffers, parts or hooks"
        return ""


_EVERY_MODULES = frozenset(vars(torch.nn.Module()))


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a user's module in which there may be numbers."""
    if _is_ours(type(module)):
        return
    for name, value in vars(module).items():
        if name not in _EVERY_MODULES and not isinstance(value, _PLAIN) and _Contents()(value) is not value:
            yield name, value


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


class Tensors:
    """Tensors that a recording holds: where their memory is, what shape it has, and their hooks."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known = [(tensor, _standing(tensor)) for tensor in {id(t): t for t in tensors}.values()]

    def difference(self) -> str:
        """Which of them is another."""
        for tensor, before in self._known:
            now = _standing(tensor)
            if now != before:
                what = next(name for name, one, other in zip(_STANDING, now, before, strict=True) if one != other)
                return f"a tensor of shape {tuple(tensor.shape)} that the step uses has {what}"
        return ""


_STANDING = ("another storage", "another shape", "other strides", "another requires_grad", "other hooks", "other hooks")


def _standing(tensor: torch.Tensor) -> tuple[Any, ...]:
    hooks, later = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (
        tensor.data_ptr() if tensor.layout is torch.strided else id(tensor),
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.requires_grad,
        tuple(map(id, hooks.values())) if hooks else None,
        tuple(map(id, later.values())) if later else None,
    )
