"""Of which shapes, dtypes and distributions the arguments of a step are, and other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distconv.capture.watch.structures import flattened, opened, structure
from distconv.capture.watch.values import PLAIN, Contents, same
from distconv.tensor import DistTensor

_OTHER = (
    "is another object, or something else is in it: pass tensors alone, or in lists, tuples, dictionaries or "
    "dataclasses"
)


class Arguments:
    """Of which shapes, dtypes, strides and distributions the arguments are, and other values."""

    def __init__(self, args: Sequence[Any]) -> None:
        leaves = list(flattened(args))
        self._structure = structure(args)
        self._nested = any(opened(each) is not None for each in args)
        self._leaves = [_described(leaf) for leaf in leaves]
        self._pattern = _pattern(leaves)

    def difference(self, args: Sequence[Any], leaves: Sequence[Any]) -> str:
        """What is different in ``args``, which has ``leaves``."""
        if len(leaves) != len(self._leaves) or (self._nested and structure(args) != self._structure):
            return "other arguments"
        for number, (leaf, before) in enumerate(zip(leaves, self._leaves, strict=True)):
            now = _described(leaf)
            if not (now == before if isinstance(leaf, torch.Tensor) else same(now, before)):
                if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                    return f"argument {number}, of type {type(leaf).__name__}, {_OTHER}"
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


def identity(value: Any) -> Any:
    """A value that :func:`same` finds the same until something else is in ``value``: other tensors, say."""
    leaves = [leaf if isinstance(leaf, torch.Tensor) else Contents()(leaf) for leaf in flattened(value)]
    return structure(value), *leaves


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
    return Contents()(value)
