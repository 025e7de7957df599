"""Variables that a function's code names, and what is in them."""

from __future__ import annotations

import dis
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from distconv.capture.watch.values import Contents, attributes_of, is_ours, is_plain_object, same


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
        self.contents = Contents(self.names)(self.value)

    def changed(self) -> bool:
        now = self.now()
        if not same(now, self.value):
            return True
        return self.contents is not self.value and not same(Contents(self.names)(now), self.contents)


class Variables:
    """Variables, and attributes, that code names."""

    def __init__(self) -> None:
        self._found: list[_Reference] = []

    def difference(self) -> str:
        """Which of those that are read is another."""
        for each in self._found:
            if each.read and each.changed():
                return f"{each.name} is not what it was"
        return ""

    def set_by_the_step(self) -> str:
        """Which is another, read or not."""
        return next((each.name for each in self._found if each.changed()), "")

    def _keep(
        self, key: str, holder: Mapping[str, Any] | CellType, name: str, read: bool, attributes: frozenset[str]
    ) -> Any:
        reference = _Reference(name, holder, key, None, read, attributes)
        reference.keep()
        self._found.append(reference)
        return reference.value


class ForwardVariables(Variables):
    """Global variables that the forward passes of ``modules`` name."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        for forward in dict.fromkeys(type(module).forward for module in modules):
            if isinstance(forward, FunctionType) and not is_ours(forward):
                attributes, outer = frozenset(_names(forward, "ATTR", "METHOD")[0]), forward.__globals__
                for name in sorted(_names(forward, "GLOBAL", "NAME")[0] & outer.keys()):
                    self._keep(name, outer, name, True, attributes)


class References(Variables):
    """Variables outside of ``function``, and attributes of objects there, that its code names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.values: list[Any] = []
        """Of them, and arguments that are bound to the function."""
        self._seen: set[int] = set()
        self._methods: set[tuple[int, int]] = set()
        """Objects, and functions of their classes."""
        self._look(function)

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._method(value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            if not is_ours(value):
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
            if is_plain_object(owner):
                self._attributes(owner, function)

    def _attributes(self, owner: Any, function: Any) -> None:
        self.values.append(owner)
        if isinstance(owner, torch.nn.Module):
            return  # It is looked at as a whole.
        loaded, stored = _names(function, "ATTR", "METHOD")
        attributes = ChainMap(getattr(owner, "__dict__", {}), attributes_of(type(owner)))  # type: ignore[arg-type]
        for name in sorted(stored | (loaded & attributes.keys())):
            self._add(name, attributes, f"{type(owner).__name__}.{name}", name in loaded, frozenset(loaded))
            member = attributes.get(name)
            member = member.fget if isinstance(member, property) else member
            if isinstance(member, FunctionType) and not is_ours(member):
                self._method(owner, member)

    def _add(
        self, key: str, holder: Mapping[str, Any] | CellType, name: str, read: bool, attributes: frozenset[str]
    ) -> None:
        self._note(self._keep(key, holder, name, read, attributes))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


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
