"""Modules that a step calls, and tensors that it uses: whether they are what they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from distconv.capture.watch.places import Key
from distconv.capture.watch.values import EVERY_MODULES, HOOKS, PLAIN, Contents, changed, is_ours, same

_MEMBERS = ("_parameters", "_buffers", "_modules")


class Modules:
    """Modules that are called: their parameters, buffers, parts, hooks, and attributes such as ``training``."""

    def __init__(self, modules: Iterable[torch.nn.Module], without: AbstractSet[Key] = frozenset()) -> None:
        """``without`` places that do not count."""
        self.modules = list({id(part): part for module in modules for part in module.modules()}.values())
        self._states = [
            (module, attributes, *self._state(attributes))
            for module in self.modules
            for attributes in [_without(module, {name for here, name in without if here == id(module)})]
        ]
        self._look = Contents(without=without)
        own = {
            id(value): (module, name)
            for module, attributes, *_ in self._states
            for name, value in _own(module, attributes)
        }
        self._contents = [(module, name, self._look(vars(module)[name])) for module, name in own.values()]

    @staticmethod
    def _state(attributes: Mapping[str, Any]) -> tuple[list[int], list[Any], list[Any]]:
        members = [value for name in (*_MEMBERS, *HOOKS) for value in (attributes.get(name) or {}).values()]
        return [*map(id, attributes.values()), *map(id, members)], list(attributes.values()), members

    def difference(self) -> str:
        """Which of them has changed, and in what."""
        for module, attributes, ids, values, members in self._states:
            now = [*map(id, attributes.values())]
            for name in (*_MEMBERS, *HOOKS):
                if attributes.get(name):
                    now += map(id, attributes[name].values())
            if now != ids:
                text = self._named(module, attributes, values, members)
                if text:
                    return text
        for module, name, before in self._contents:
            text = changed(before, self._look(vars(module)[name]), f"{type(module).__name__}.{name}")
            if text:
                return text
        return ""

    def _named(
        self, module: torch.nn.Module, attributes: Mapping[str, Any], values: list[Any], members: list[Any]
    ) -> str:
        kind = type(module).__name__
        if len(attributes) != len(values):
            return f"{kind} has other attributes"
        for (name, now), before in zip(attributes.items(), values, strict=True):
            if not same(now, before):
                return f"{kind}.{name} is not what it was ({_short(before)} before, {_short(now)} now)"
        now_members = self._state(attributes)[2]
        if [*map(id, now_members)] != [*map(id, members)]:
            return f"{kind} has other parameters, buffers, parts or hooks"
        return ""


class _Without(Mapping[str, Any]):
    """Attributes of a module, as they are now, without some."""

    def __init__(self, attributes: Mapping[str, Any], names: AbstractSet[str]) -> None:
        self._attributes, self._names = attributes, names

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            raise KeyError(name)
        return self._attributes[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._attributes if name not in self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _without(module: torch.nn.Module, names: AbstractSet[str]) -> Mapping[str, Any]:
    return _Without(vars(module), names) if names else vars(module)


def _own(module: torch.nn.Module, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Attributes of a user's module in which there may be numbers."""
    if is_ours(type(module)):
        return
    for name, value in attributes.items():
        if name not in EVERY_MODULES and not isinstance(value, PLAIN) and Contents()(value) is not value:
            yield name, value


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


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
