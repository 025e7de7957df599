"""What a recording depends on besides values: arguments, modules, what the function refers to, tensors, settings.

Each part says in a sentence what is not any more what it was; nothing if all is. It is asked in each replay, so it
compares what is there with what was, and describes only what differs.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from distconv.tensor import DistTensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set)
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
    holder: dict[str, Any] | CellType
    key: str
    value: Any
    read: bool
    """Whether the function reads it; if it only sets it, it is nothing that a recording depends on."""
    length: int

    def now(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key)
        try:
            return self.holder.cell_contents
        except ValueError:
            return None

    def changed(self) -> bool:
        now = self.now()
        return not same(now, self.value) or self.length != _length(now)


def _length(value: Any) -> int:
    return len(value) if type(value) in _CONTAINERS else -1


class References:
    """Variables outside of ``function``, and attributes of objects there, that its code names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._found: list[_Reference] = []
        self.values: list[Any] = []
        """Of them, and arguments that are bound to the function."""
        self._seen: set[int] = set()
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

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._look(value.__func__)
            self._attributes(value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            if value.__module__ is None or value.__module__.partition(".")[0] not in _OURS:
                self._variables(value)
        elif hasattr(value, "func") and hasattr(value, "keywords"):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._note(each)
        elif not isinstance(value, (type, ModuleType, torch.nn.Module)):
            called = getattr(type(value), "__call__", None)  # noqa: B004 - a function with code is looked for
            if isinstance(called, FunctionType):
                self._attributes(value, called)
        if isinstance(value, torch.nn.Module):
            self.values.append(value)

    def _note(self, value: Any) -> None:
        self.values.append(value)
        if callable(value):
            self._look(value)

    def _variables(self, function: FunctionType) -> None:
        loaded, stored = _names(function, "GLOBAL", "NAME")
        outer = function.__globals__
        for name in sorted(loaded | stored):
            if name in outer:
                self._add(name, outer, name, name in loaded)
        from_cells, _ = _names(function, "DEREF")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, cell, name, name in from_cells)
        owners = [outer[name] for name in sorted(loaded) if name in outer]
        for owner in (*owners, *map(_contents, function.__closure__ or ())):
            if _is_plain_object(owner):
                self._attributes(owner, function)

    def _attributes(self, owner: Any, function: Any) -> None:
        self.values.append(owner)
        if isinstance(owner, torch.nn.Module):
            return  # It is looked at as a whole.
        loaded, stored = _names(function, "ATTR", "METHOD")
        attributes = getattr(owner, "__dict__", {})
        for name in sorted((loaded | stored) & set(attributes)):
            self._add(name, attributes, f"{type(owner).__name__}.{name}", name in loaded)

    def _add(self, key: str, holder: dict[str, Any] | CellType, name: str, read: bool) -> None:
        reference = _Reference(name, holder, key, None, read, -1)
        reference.value = reference.now()
        reference.length = _length(reference.value)
        self._found.append(reference)
        self._note(reference.value)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


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
