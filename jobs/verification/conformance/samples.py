"""torch's samples: every operator and module that its own tests cover, in all spellings and variants.

Source: ``torch.testing._internal``, OpInfo and ModuleInfo.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from distconv.jobs.verification.engine.backends import ReferenceBackend
from distconv.jobs.verification.engine.layouts import CaseLayout, Extents
from distconv.jobs.verification.engine.runner import Case

_SEED = 7

# A crash would end the job, and values that the memory holds differ on every run.
WITHOUT_ELEMENTS = {
    "lu_unpack": "torch crashes",
    "_segment_reduce.offsets": "torch crashes",
    "nn.functional.pdist": "torch crashes",
    "nn.functional.multi_margin_loss": "torch returns what the memory holds",
    "nn.functional.multilabel_margin_loss": "torch returns what the memory holds",
    "nn.MultiMarginLoss": "torch returns what the memory holds",
    "nn.MultiLabelMarginLoss": "torch returns what the memory holds",
    "addmv": "torch computes it, and its backward pass raises",
    "index_fill": "torch raises, and names strides of its memory",
}
"""Operators that cannot be compared on tensors without elements, and the reasons."""

DTYPES = (torch.float64, torch.int64, torch.bool)
"""Dtypes of samples, of which the first that an operator accepts is used."""

UNDETERMINED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
"""Operators whose values are whatever the memory holds."""

EMPTY_KINDS = ("samples", "height", "width")
"""Layouts in which an operator is computed without elements."""

KINDS = (
    *("samples", "height", "width", "samples + space", "uneven", "cyclic"),
    *("replicas + space", "channels", "channels + space"),
)
"""Kinds of layouts in which the largest sample of each operator is computed."""

MOST = 40
"""Maximum number of samples among which the largest one is selected."""

# Grid axes by number of dimensions, as networks use them.
_DIMS = {1: ["n"], 2: ["n", "w"], 3: ["n", "c", "w"], 4: ["n", "c", "h", "w"], 5: ["n", "c", "d", "h", "w"]}


@dataclass(frozen=True)
class Sample(Case):
    """A call of an operator or a module with its arguments. The call gets copies of them."""

    operator: str
    option: str
    """The variant, and the sample's number."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: Callable[[], torch.nn.Module] | None = None
    """Builds the module, which ``function`` takes first. None for a function."""
    kinds: Sequence[str] | None = None
    """Kinds of layouts, with an axis for every dimension. None splits the first and the last dimension."""

    as_torch_takes_it = True

    @property
    def axes(self) -> frozenset[str]:
        """Return the grid axes of all tensors of the sample."""
        return frozenset(axis for value in self.tensors() for axis in self._dims(value) if axis)

    def layouts(self, ranks: int) -> Sequence[CaseLayout]:
        """Return the layouts of ``kinds``; without them, the first dimension, the last, and both are split."""
        if self.kinds is not None:
            return super().layouts(ranks)
        grids: dict[str, Extents] = {"first": {"n": ranks}, "last": {"w": ranks}}
        if ranks % 2 == 0 and ranks > 2:
            grids["both"] = {"n": 2, "w": ranks // 2}
        layouts = []
        for name, extents in grids.items():
            layouts.append(CaseLayout(name, tuple(extents.items())))
            if len(self.tensors()) > 1:
                layouts.append(CaseLayout(f"{name}, first tensor only", tuple(extents.items()), first_only=True))
        return layouts

    def compute(self, backend: ReferenceBackend) -> None:
        """Call the function, and differentiate its results."""
        first = next(iter(self.tensors()), None)

        def put(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if can_be_split(value) and (value is first or not backend.layout.first_only):
                return backend.put(value, self._dims(value), value.requires_grad)
            return backend.plain(value, value.requires_grad)

        args, kwargs = tree_map(put, (self.args, self.kwargs))
        module = None if self.module is None else backend.model(self.module(), parallel=self.kinds is not None)
        seed()
        result = self.function(*([] if module is None else [module]), *args, **kwargs)
        # Python's numbers are results as well, such as those of item() or equal().
        answers = [y for y in tree_leaves(result) if isinstance(y, (torch.Tensor, bool, int, float))]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        backend.differentiate(
            [y if isinstance(y, torch.Tensor) else torch.tensor(y) for y in answers],
            {f"x{number}": x for number, x in enumerate(inputs)},
            module,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the input tensors that can be split."""
        return [value for value in tree_leaves((self.args, self.kwargs)) if can_be_split(value)]

    def size(self) -> int:
        """Return the number of elements of the first tensor that can be split; 0 without one."""
        return next((value.numel() for value in self.tensors()), 0)

    def _dims(self, value: torch.Tensor) -> list[str | None]:
        if self.kinds is not None and value.dim() in _DIMS:
            return list(_DIMS[value.dim()])
        # "nw": a vector is split over the first of these axes that the grid splits.
        return ["n", *[None] * (value.dim() - 2), "w"] if value.dim() > 1 else ["nw"]


def can_be_split(value: Any) -> bool:
    """Return True if an argument is a strided tensor of at least one dimension."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() > 0


def seed() -> None:
    """Seed all generators that torch's samples use, identically on all ranks."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def names() -> list[str]:
    """Return every operator and module that has samples."""
    return list(_sample_databases())


def samples(name: str, most: int | None = None) -> Iterator[Sample]:
    """Yield the samples of an operator in all variants, or of a module, that have tensors.

    Parameters
    ----------
    name : str
        Name of the operator.
    most : int, optional
        Maximum number of samples of each variant. None: all.

    Returns
    -------
    iterator of Sample
    """
    return (sample for sample in _all_samples(name, most) if sample.tensors())


def _all_samples(name: str, most: int | None) -> Iterator[Sample]:
    for info in _sample_databases()[name]:
        if hasattr(info, "module_cls"):
            yield from _module_samples(info, most)
            continue
        for number, drawn in enumerate(_draw_samples(info, most)):
            yield _make_sample(info, str(number), drawn, [info.op])
            if info.inplace_variant is not None and _can_change_in_place(drawn):
                yield _make_sample(info, f"{number} in place", drawn, [partial(_in_place, info.inplace_variant)])
            if info.supports_out and "out" not in drawn.kwargs:
                yield _make_sample(info, f"{number} out=", drawn, [partial(_out, info.op)], finish=False)


def largest(name: str) -> Iterator[Sample]:
    """Yield the first and last of an operator's largest samples, in all variants, or the first samples of a module."""
    for info in _sample_databases()[name]:
        if hasattr(info, "module_cls"):
            of_module = [replace(each, kinds=KINDS) for each in _module_samples(info, MOST) if each.size()]
            for evaluated in (False, True):
                yield from islice((each for each in of_module if each.option.endswith("eval") == evaluated), 1)
            continue
        drawn = _draw_samples(info, MOST)
        sizes = [_make_sample(info, "", each, []).size() for each in drawn]
        biggest = [number for number, size in enumerate(sizes) if size and size == max(sizes)]
        spellings = [info, *info.aliases]
        ways = ("op", "method_variant", "operator_variant")
        functions = [getattr(spelling, way, None) for spelling in spellings for way in ways]
        changing = [partial(_in_place, s.inplace_variant) for s in spellings if s.inplace_variant is not None]
        for number in dict.fromkeys([*biggest[:1], *biggest[-1:]]):
            yield replace(_make_sample(info, f"sample {number}", drawn[number], functions), kinds=KINDS)
            if changing and _can_change_in_place(drawn[number]):
                yield replace(_make_sample(info, f"sample {number}, in place", drawn[number], changing), kinds=KINDS)


@dataclass(frozen=True)
class Emptied(Sample):
    """A sample without elements, which distconv must compute or reject as torch does."""

    as_torch_takes_it = False


def emptied(name: str) -> Iterator[Emptied]:
    """Yield variants of the largest sample of an operator in which a dimension has size 0.

    Each dimension of the first tensor is emptied in turn. If there are other tensors, a second variant also empties
    their dimensions of the same size.
    """
    for info in [] if name in WITHOUT_ELEMENTS else _sample_databases()[name]:
        if hasattr(info, "module_cls"):
            sample = next((each for each in _module_samples(info, MOST) if each.size()), None)
        else:
            drawn = [_make_sample(info, "", each, [info.op]) for each in _draw_samples(info, MOST)]
            sample = max((each for each in drawn if each.size()), key=Sample.size, default=None)
        first = None if sample is None else sample.tensors()[0]
        for dim in range(0 if first is None else first.dim()):
            assert sample is not None and first is not None
            for every in [False, True][: len(sample.tensors())]:
                args, kwargs = tree_map(partial(_empty_dimension, first, dim, every), (sample.args, sample.kwargs))
                option = f"dimension {dim}{' of all' if every else ''}"
                yield Emptied(name, option, sample.function, args, kwargs, sample.module, EMPTY_KINDS)


def _empty_dimension(first: torch.Tensor, dim: int, every: bool, value: Any) -> Any:
    """Return ``first`` without elements along ``dim``, and other values unchanged.

    With ``every``, other tensors are emptied along their dimensions of the same size.
    """
    if not can_be_split(value) or not (every or value is first):
        return value
    empty = [d for d, n in enumerate(value.shape) if n == first.shape[dim] and (value is not first or d == dim)]
    shape = [0 if d in empty else n for d, n in enumerate(value.shape)]
    return value.detach()[tuple(slice(n) for n in shape)].requires_grad_(value.requires_grad)


@cache
def _sample_databases() -> dict[str, list[Any]]:
    """Return the sample databases of all operators and modules, by name."""
    # torch's test modules import expecttest, which need not be installed, for a base class of tests. None runs here.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    databases: dict[str, list[Any]] = {}
    for operator in op_db:
        if operator.name not in UNDETERMINED:
            databases.setdefault(_name(operator), []).append(operator)
    for module in module_db:
        databases.setdefault(f"nn.{module.module_cls.__name__}", []).append(module)
    return databases


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}".removesuffix(".")


def _draw_samples(operator: Any, most: int | None) -> list[Any]:
    dtype = next((dtype for dtype in DTYPES if dtype in operator.dtypes), None)
    if dtype is None:
        return []
    seed()
    grad = dtype is torch.float64 and operator.supports_autograd
    # A list, because the samples draw random numbers while they are made: a call in between would draw some, too.
    return list(islice(operator.sample_inputs("cpu", dtype, requires_grad=grad), most))


def _can_change_in_place(sample: Any) -> bool:
    """Return True if the first argument can be changed in place."""
    return not sample.broadcasts_input and isinstance(sample.input, torch.Tensor)


def _make_sample(operator: Any, option: str, sample: Any, functions: Sequence[Any], finish: bool = True) -> Sample:
    """Return a sample of ``operator`` that calls each of ``functions``; None is left out.

    ``finish`` applies torch's own conversion of a result to its differentiable part, which results of ``out=`` lack.
    """
    calls = [partial(_call_and_finish, sample.output_process_fn_grad if finish else _same, f) for f in functions if f]
    function = calls[0] if len(calls) == 1 else partial(_call_each, calls)
    return Sample(_name(operator), option, function, (sample.input, *sample.args), sample.kwargs)


def _same(result: Any) -> Any:
    return result


def _call_each(calls: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> list[Any]:
    return [call(*args, **kwargs) for call in calls]


def _call_and_finish(finish: Callable[[Any], Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return finish(function(*args, **kwargs))


def _in_place(function: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # A copy, because torch rejects an in-place change of a leaf that requires a gradient.
    return function(input.clone(), *args, **kwargs)


def _out(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # torch's functions with out= do not support differentiation. A first call gives the shapes of the results.
    with torch.no_grad():
        result = function(*args, **kwargs)
        out = torch.zeros_like(result) if isinstance(result, torch.Tensor) else tuple(map(torch.zeros_like, result))
        function(*args, **kwargs, out=out)
    return out


def _module_samples(info: Any, most: int | None) -> Iterator[Sample]:
    for training in (True, False):
        seed()
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        for number, given_sample in enumerate(list(islice(given, most))):
            option = f"{number}{'' if training else ' eval'}"
            module = partial(_build_module, info.module_cls, given_sample.constructor_input, training)
            forward = given_sample.forward_input
            yield Sample(f"nn.{info.module_cls.__name__}", option, _call_module, forward.args, forward.kwargs, module)


def _build_module(kind: type[torch.nn.Module], given: Any, training: bool) -> torch.nn.Module:
    seed()  # the same parameters on all ranks and in the reference
    return kind(*given.args, **given.kwargs).double().train(training)


def _call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
