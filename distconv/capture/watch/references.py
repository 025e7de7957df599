"""Variables that the code of functions names, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from distconv.capture.watch.names import names_in
from distconv.capture.watch.places import Key, Places
from distconv.capture.watch.values import Contents, can_change, changed, is_ours, place_of_change


@dataclass(eq=False)
class _Reference:
    """A variable, or an object that is bound to a function."""

    name: str
    holder: Mapping[str, Any] | CellType
    key: str
    read: bool
    """Whether code reads it; if it only sets it, it is nothing that a recording depends on."""
    value: Any = None
    contents: Any = None
    everything: Any = None
    """Its contents, attributes that are only set included."""

    def now(self) -> Any:
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.key)
        try:
            return self.holder.cell_contents
        except ValueError:
            return None


class References:
    """Variables outside of ``function``, and of functions that it calls, that their code names.

    What is in them counts as far as it has keys, or attributes that any of the code names.
    """

    def __init__(
        self, function: Callable[..., Any], called: Iterable[FunctionType] = (), kinds: Iterable[type] = ()
    ) -> None:
        """``called`` are functions that it calls, and ``kinds`` classes of modules that are called."""
        own, bound = _unwrapped(function)
        functions = [each for each in {id(each): each for each in (*own, *called)}.values() if not is_ours(each)]
        bound += [(kind.__name__, kind) for kind in kinds if not is_ours(kind)]
        found = [variable for each in functions for variable in _variables(each)]
        found += [_Reference(name, {"": value}, "", True) for name, value in bound]
        self._found = list({(id(each.holder), each.key, each.read): each for each in found}.values())
        codes = [names_in(each.__code__) for each in functions]
        self._read = frozenset(name for each in codes for name in each.attributes | each.texts)
        self._names = self._read.union(*(each.attributes_set for each in codes))
        self.look()
        self.values = [each.value for each in self._found]

    def look(self, without: AbstractSet[Key] = frozenset()) -> None:
        """What is there now is what there is to be; ``without`` places that do not count."""
        self._found = [each for each in self._found if (id(each.holder), each.key) not in without]
        self._contents, self._everything = Contents(self._read, without), Contents(self._names, without)
        for each in self._found:
            each.value = each.now()
            each.contents, each.everything = self._contents(each.value), self._everything(each.value)

    def add_to(self, places: Places) -> None:
        """Add the variables, and what is behind them."""
        for each in self._found:
            places.add_variable(each.name, each.holder, each.key, self._names)

    def difference(self) -> str:
        """Which of those that are read is another, or has something else in it."""
        for each in self._found:
            now = each.now()
            if each.read and (now is not each.value or each.contents is not now or can_change(now)):
                text = changed(each.contents, self._contents(now), each.name)
                if text:
                    return text
        return ""

    def set_by_the_step(self) -> str:
        """Which is another, read or not."""
        pairs = ((each, self._everything(each.now())) for each in self._found)
        return next(filter(None, (place_of_change(each.everything, now, each.name) for each, now in pairs)), "")


def _unwrapped(function: Any) -> tuple[list[FunctionType], list[tuple[str, Any]]]:
    """Functions that ``function`` is made of, and objects that are bound to them, by their names."""
    if isinstance(function, FunctionType):
        return [function], []
    if isinstance(function, partial):
        own, bound = _unwrapped(function.func)
        given = [*function.args, *function.keywords.values()]
        return own, [*bound, *((f"an argument bound to the step ({n})", each) for n, each in enumerate(given))]
    if isinstance(function, MethodType):
        own, bound = _unwrapped(function.__func__)
        return own, [*bound, (type(function.__self__).__name__, function.__self__)]
    call = getattr(type(function), "__call__", None)  # noqa: B004 - a function with code is looked for
    own = [call] if isinstance(call, FunctionType) else []
    return own, [(type(function).__name__, function)]


def _variables(function: FunctionType) -> Iterator[_Reference]:
    names, outer = names_in(function.__code__), function.__globals__
    for name in sorted(names.globals | names.globals_set):
        if name in outer or name in names.globals_set:
            yield _Reference(name, outer, name, name in names.globals)
    defaults = {"": (function.__defaults__, function.__kwdefaults__)}
    if any(defaults[""]):
        yield _Reference(f"({function.__name__}'s defaults)", defaults, "", True)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Reference(name, cell, name, name in names.cells)
