"""torch's samples: every operator and module that its own tests know, with their variants.

Source: ``torch.testing._internal``, OpInfo and ModuleInfo.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

_SEED = 7

DTYPES = (torch.float64, torch.int64, torch.bool)
"""What samples are asked for in: the first of these that an operator takes."""

UNDETERMINED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
"""Operators whose values are whatever the memory holds."""


@dataclass(frozen=True)
class Sample:
    """A call with its arguments, which whoever calls it copies first."""

    operator: str
    option: str
    """The variant, and the sample's number."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: Callable[[], torch.nn.Module] | None = None
    """With it, ``function`` takes the module first."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return f"{self.operator} {self.option}"

    def tensors(self) -> int:
        """How many tensors go in that can be split."""
        return sum(map(can_be_split, tree_leaves((self.args, self.kwargs))))


def can_be_split(value: Any) -> bool:
    """Whether an argument is a tensor of at least one dimension, with a memory of its own."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() > 0


def seed() -> None:
    """Let all random numbers that torch's samples draw be the same on all ranks."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def names() -> list[str]:
    """Every operator and module that has samples."""
    operators, modules = _databases()
    return list(dict.fromkeys([*map(_operator_name, operators), *(f"nn.{m.module_cls.__name__}" for m in modules)]))


def samples(name: str, most: int | None = None) -> Iterator[Sample]:
    """The samples of one operator, in all variants, or of one module; at most so many of each variant."""
    operators, modules = _databases()
    for operator in operators:
        if _operator_name(operator) == name:
            yield from _of_operator(operator, most)
    for module in modules:
        if f"nn.{module.module_cls.__name__}" == name:
            yield from _of_module(module, most)


def _databases() -> tuple[list[Any], list[Any]]:
    # torch's test modules import it for a class of tests, which nothing here is.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return [operator for operator in op_db if operator.name not in UNDETERMINED], module_db


def _operator_name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}".removesuffix(".")


def _of_operator(operator: Any, most: int | None) -> Iterator[Sample]:
    dtype = next((dtype for dtype in DTYPES if dtype in operator.dtypes), None)
    if dtype is None:
        return
    seed()
    grad = dtype is torch.float64 and operator.supports_autograd
    # All at once: what runs in between draws numbers, too.
    drawn = list(islice(operator.sample_inputs("cpu", dtype, requires_grad=grad), most))
    for number, found in enumerate(drawn):
        args = (found.input, *found.args)
        finish = partial(_finished, found.output_process_fn_grad)
        yield Sample(_operator_name(operator), str(number), partial(finish, operator.op), args, found.kwargs)
        inplace = operator.inplace_variant
        if inplace is not None and not found.broadcasts_input and isinstance(found.input, torch.Tensor):
            function = partial(finish, partial(_in_place, inplace))
            yield Sample(_operator_name(operator), f"{number} in place", function, args, found.kwargs)
        if operator.supports_out and "out" not in found.kwargs:
            yield Sample(_operator_name(operator), f"{number} out=", partial(_out, operator.op), args, found.kwargs)


def _finished(finish: Callable[[Any], Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return finish(function(*args, **kwargs))


def _in_place(function: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(input.clone(), *args, **kwargs)


def _out(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        made = function(*args, **kwargs)
        out = torch.zeros_like(made) if isinstance(made, torch.Tensor) else tuple(map(torch.zeros_like, made))
        function(*args, **kwargs, out=out)
    return out


def _of_module(info: Any, most: int | None) -> Iterator[Sample]:
    for training in (True, False):
        seed()
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for number, found in enumerate(list(islice(given, most))):
            option = f"{number}{'' if training else ' eval'}"
            module = partial(_built, info.module_cls, found.constructor_input, training)
            forward = found.forward_input
            yield Sample(f"nn.{info.module_cls.__name__}", option, _called, forward.args, forward.kwargs, module)


def _built(kind: type[torch.nn.Module], given: Any, training: bool) -> torch.nn.Module:
    seed()
    return kind(*given.args, **given.kwargs).double().train(training)


def _called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
