"""Modules that a step calls, and tensors that it uses: whether they are what they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distconv.capture.watch.values import PLAIN, Contents, changed, is_ours, same

_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Modules:
    """Modules that are called: their parameters, buffers, parts, hooks, and attributes such as ``training``."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = list({id(part): part for module in modules for part in module.modules()}.values())
        self._states = [(module, vars(module), *self._state(module)) for module in self.modules]
        own = {id(value): (module, name) for module in self.modules for name, value in _own(module)}
        self._contents = [(module, name, Contents()(vars(module)[name])) for module, name in own.values()]

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
            text = changed(before, Contents()(vars(module)[name]), f"{type(module).__name__}.{name}")
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


_EVERY_MODULES = frozenset(vars(torch.nn.Module()))


def _own(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a user's module in which there may be numbers."""
    if is_ours(type(module)):
        return
    for name, value in vars(module).items():
        if name not in _EVERY_MODULES and not isinstance(value, PLAIN) and Contents()(value) is not value:
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
