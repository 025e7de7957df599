"""Guards of a recording: conditions that are checked before each replay, on this rank.

- :class:`ArgumentGuard`: shapes, dtypes, distributions and Python values;
- :class:`ModuleGuard`: mode, members and hooks of the modules that the step calls;
- :class:`TensorGuard`: memory, ``requires_grad`` and hooks of the tensors that it uses;
- :class:`OptimizerGuard`: settings and state of the optimizers that step inside it;
- :func:`current_modes`: modes of torch and distconv.

Every other Python value that the step reads is a constant of the recording: comparing all of them would take as long as
the step. :mod:`.captured` combines the results of all ranks; this module contains no communication.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

from distconv.communication import gradient_reduction
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.tensor import DistTensor

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, torch.Size, torch.dtype,
              torch.device, torch.nn.Module, Distribution, ProcessGrid)  # fmt: skip


def is_comparable(value: Any) -> bool:
    """Return True if a guard can compare later arguments with ``value``: a tensor, or a hashable value.

    A dataclass that is not registered with torch's trees is not comparable: it may hold tensors, even if it is frozen
    and so hashable.
    """
    if is_constant(value) or isinstance(value, torch.Tensor):
        return True
    return isinstance(value, Hashable) and (isinstance(value, type) or not is_dataclass(value))


def is_constant(value: Any) -> bool:
    """Return True if a result has a type that holds no tensors, so that each replay can return it."""
    return isinstance(value, _CONSTANTS)


def block_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's block of a DistTensor; any other tensor itself."""
    return tensor.local if isinstance(tensor, DistTensor) else tensor


def _is_same(one: Any, other: Any) -> bool:
    """Return True if both are the same object, or equal values of one type. Tensors are compared by identity."""
    if one is other:
        return True
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


# -- arguments --------------------------------------------------------------------------------------------------------

_METADATA_NAMES = (
    *("type", "distribution", "shape", "strides", "dtype", "device", "layout", "requires_grad"),
    *("a block of shape", "a block with strides and offset"),
)


def _metadata(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    block, dist = block_of(value), value.dist if isinstance(value, DistTensor) else None
    strides = value._strides if isinstance(value, DistTensor) else None
    layout = (block.stride(), block.storage_offset()) if block.layout is torch.strided else None
    common = (block.dtype, block.device, block.layout, block.requires_grad)
    return type(value), dist, value.shape, strides, *common, block.shape, layout


class ArgumentGuard:
    """Guard of the arguments: the structure of their tree, metadata of tensors, and other values."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._spec, self._pattern = spec, _identity_pattern(leaves)
        self._leaves = [_metadata(leaf) for leaf in leaves]

    def describe_change(self, args: Sequence[Any], leaves: Sequence[Any], spec: TreeSpec) -> str:
        """Return the guard failure as a sentence, or "" if the guard passes.

        Parameters
        ----------
        args : sequence
            The arguments of a call.
        leaves, spec
            The leaves and the structure of their tree.

        Returns
        -------
        str
        """
        if spec != self._spec:
            return "the arguments have another tree structure"
        for number, (leaf, before) in enumerate(zip(leaves, self._leaves, strict=True)):
            now = _metadata(leaf)
            if not _is_same(now, before):
                path = keystr(tree_flatten_with_path(tuple(args))[0][number][0])
                return f"argument {path.removeprefix('[').replace(']', '', 1)} {_describe_argument_change(before, now)}"
        # A step with one tensor as two arguments has one slot for both.
        if _identity_pattern(leaves) != self._pattern:
            return "the arguments that are the same tensor are not those of the recording"
        return ""


def _describe_argument_change(before: Any, now: Any) -> str:
    if type(before) is not tuple or type(now) is not tuple:
        return f"is {now!r:.100}, recorded as {before!r:.100}"
    name, one, other = next((n, a, b) for n, a, b in zip(_METADATA_NAMES, before, now, strict=True) if a != b)
    text = [str(tuple(each)) if isinstance(each, torch.Size) else str(each) for each in (other, one)]
    return f"has {name} {text[0]}, recorded with {text[1]}"


def _identity_pattern(leaves: Sequence[Any]) -> list[int]:
    """Return for each tensor the index of the first leaf that is the same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), n) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


# -- modules and tensors ----------------------------------------------------------------------------------------------

_MEMBERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
            "_backward_pre_hooks")  # fmt: skip


class ModuleGuard:
    """Guard of modules and their submodules: ``training``, parameters, buffers, submodules and hooks, by identity."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        all_modules = {id(part): part for module in modules for part in module.modules()}
        self._states = [(module, _members(module)) for module in all_modules.values()]

    def describe_change(self) -> str:
        """Return the guard failure as a sentence, or "" if the guard passes."""
        for module, before in self._states:
            now = _members(module)
            # By identity: == would compare the elements of tensors.
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                kind = type(module).__name__
                if now[0] is not before[0]:
                    return f"{kind}.training is {now[0]}, recorded with {before[0]}"
                return f"{kind} has other parameters, buffers, submodules or hooks"
        return ""


def _members(module: torch.nn.Module) -> list[Any]:
    attributes = vars(module)
    members: list[Any] = [module.training]
    for name in _MEMBERS:
        if attributes[name]:
            members += attributes[name].values()
    return members


_CHANGED_PROPERTIES = (
    "other memory",
    "another shape",
    "other strides",
    "another requires_grad",
    "other hooks",
    "other hooks",
)


class TensorGuard:
    """Guard of tensors that a step uses: address, shape, strides, ``requires_grad`` and hooks, but not values."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._states = [(tensor, _state(tensor)) for tensor in {id(t): t for t in tensors}.values()]

    def describe_change(self) -> str:
        """Return the guard failure as a sentence, or "" if the guard passes."""
        for tensor, before in self._states:
            now = _state(tensor)
            if now != before:
                what = next(
                    name for name, one, other in zip(_CHANGED_PROPERTIES, now, before, strict=True) if one != other
                )
                return f"a tensor of shape {tuple(tensor.shape)} that the step uses has {what}"
        return ""


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    hooks, later = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (
        # The address, since x.data = y keeps the tensor and replaces its memory.
        tensor.data_ptr() if tensor.layout is torch.strided else id(tensor),
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.requires_grad,
        tuple(map(id, hooks.values())) if hooks else None,
        tuple(map(id, later.values())) if later else None,
    )


# -- optimizers -------------------------------------------------------------------------------------------------------


class OptimizerGuard:
    """Guard of the optimizers that step inside a captured step: settings, parameters and state tensors."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Optimizer, list[tuple[str, Any]]]] = {}

    @contextmanager
    def observe_steps(self, mark_unsupported: Callable[[str], None]) -> Iterator[None]:
        """Record the optimizers that step in a ``with`` block, and restore their settings and state at its end.

        Parameters
        ----------
        mark_unsupported : callable
            Called with the reason if an optimizer has created state or changed a setting: a replay would not do so.

        Returns
        -------
        context manager
        """
        saved: dict[int, tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]] = {}

        def note(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self._states:
                # At the first step only: afterwards its settings and state would be those after a step.
                self._states[id(optimizer)] = optimizer, _settings(optimizer)
                state = {leaf: dict(kept) for leaf, kept in optimizer.state.items()}
                saved[id(optimizer)] = [dict(group) for group in optimizer.param_groups], state

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
            change = self.describe_change()
            if change:
                mark_unsupported(f"{change} after its step. Take one step without dc.capture, so that its state exists")
        finally:
            hook.remove()
            for key, (groups, state) in saved.items():
                optimizer = self._states[key][0]
                for group, settings in zip(optimizer.param_groups, groups, strict=False):
                    group.update(settings)
                # The step may have made state for parameters that had none. It is removed.
                for leaf in list(optimizer.state):
                    optimizer.state[leaf].clear()  # in place, since the user may refer to the dictionary
                    optimizer.state[leaf].update(state.get(leaf, {}))
                    if leaf not in state:
                        del optimizer.state[leaf]

    def describe_change(self) -> str:
        """Return the guard failure as a sentence, or "" if the guard passes."""
        for optimizer, before in self._states.values():
            now, kind = _settings(optimizer), type(optimizer).__name__
            if len(now) != len(before):
                return f"{kind} has other state or parameters"
            for (name, one), (_, other) in zip(now, before, strict=True):
                if not _is_same(one, other):
                    shown = "" if isinstance(one, torch.Tensor) else f" is {one!r}, recorded with {other!r}"
                    return f"{kind}'s {name}{shown or ' is another tensor'}"
        return ""


def _settings(optimizer: Optimizer) -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    for group in optimizer.param_groups:
        settings += [("parameter", leaf) for leaf in group["params"]]
        settings += [(name, value) for name, value in group.items() if name != "params"]
        for leaf in group["params"]:
            settings += optimizer.state.get(leaf, {}).items()
    return settings


# -- modes ------------------------------------------------------------------------------------------------------------


def current_modes() -> dict[str, Any]:
    """Return the modes of torch and distconv that a step depends on, by name."""
    return {
        "torch.no_grad": not torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each) for each in ("cpu", "cuda")],
        "the default dtype": torch.get_default_dtype(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "dc.no_sync": gradient_reduction.is_no_sync(),
        "CUDA's precision": _cuda_precision() if torch.cuda.is_initialized() else None,
    }


def _cuda_precision() -> Any:
    """Return the settings that select the kernels of a CUDA graph."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        (cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32, torch.get_float32_matmul_precision()),
        (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction),
    )


def describe_mode_change(before: dict[str, Any]) -> str:
    """Return the first mode that differs from ``before``, as a sentence; "" if all are equal."""
    now = current_modes()
    if now == before:
        return ""
    name = next(name for name in now if now[name] != before[name])
    return f"{name} is {now[name]}, recorded with {before[name]}"
