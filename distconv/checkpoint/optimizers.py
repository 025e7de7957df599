"""State of an optimizer by the names of its parameters: captured, compared with what it needs, and put back.

It goes by names, not numbers, so that it fits whatever order the parameters come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from distconv.checkpoint.reading import Checkpoint, Contents
from distconv.checkpoint.values import TensorName
from distconv.errors import CheckpointError
from distconv.parameters.optimizer_state import split_of

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")

OPTIMIZER, GROUPS, SCALARS = "optimizer", "groups", "optimizer_scalars"
"""Where its class, the options of its groups and its plain values are."""

_NUMBERS = (bool, int, float, torch.Tensor)


def below(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Those whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Tensors, dict[str, Any]]:
    """Its tensors, and its values for JSON. Collective, if it is split over ranks."""
    tensors: Tensors = {}
    scalars: dict[str, Any] = {}
    if optimizer is None:
        return tensors, {OPTIMIZER: None, GROUPS: [], SCALARS: scalars}
    split = split_of(optimizer)
    state = optimizer.state if split is None else split.gather_state(optimizer)
    for name, parameter in model.named_parameters():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars[f"{name}/{key}"] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return tensors, {OPTIMIZER: type(optimizer).__name__, GROUPS: groups, SCALARS: scalars}


def other_optimizer(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """How that of a checkpoint differs; empty if it does not."""
    saved, groups = values.get(OPTIMIZER), values.get(GROUPS)
    if saved is None:
        return "was saved without an optimizer; load it without, or with strict=False"
    if saved != type(optimizer).__name__:
        return f"is of {saved}, not of {type(optimizer).__name__}"
    if not isinstance(groups, list) or not isinstance(values.get(SCALARS), dict):
        return f"has no {GROUPS} and {SCALARS} of {saved}"
    if len(groups) != len(optimizer.param_groups):
        return f"has {len(groups)} parameter groups, not {len(optimizer.param_groups)}"
    return ""


def check_state(
    contents: Contents | Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, what: str
) -> None:
    """Refuse state that the optimizer could not take its next step with.

    Raises
    ------
    CheckpointError
        If there is any; the text lists what is wrong.
    """
    wrong = []
    for number, (saved, group) in enumerate(zip(contents.values[GROUPS], optimizer.param_groups, strict=True)):
        wrong += _unlike(saved, group, f"parameter group {number}")
    tensors, scalars = below("optimizer/", contents.tensors), contents.values[SCALARS]
    owners = {name.rpartition("/")[0] for name in (*tensors, *scalars)}
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    needed: dict[tuple[int, int, torch.dtype], dict[str, _State]] = {}
    for name, parameter in model.named_parameters():
        # Without any state it has not taken a step, and begins with its first.
        if name not in owners or id(parameter) not in group_of:
            continue
        group = group_of[id(parameter)]
        kind = (id(group), parameter.dim(), parameter.dtype)
        if kind not in needed:
            needed[kind] = _needed(optimizer, group, parameter)
        for key, state in needed[kind].items():
            wrong += _misfit(f"{name}/{key}", state, tensors, scalars, tuple(parameter.shape))
    if wrong:
        raise CheckpointError(f"{what} does not fit its optimizer, {len(wrong)} differences: {'; '.join(wrong)}")


class _State(NamedTuple):
    """What an optimizer keeps of a parameter under one name."""

    dtype: torch.dtype | None
    """None where it is no tensor."""
    like_parameter: bool
    """Whether it has the parameter's shape."""


_COUNTS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers without dimensions, whose dtype and device do not depend on the parameter."""


def _needed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, _State]:
    """What one of torch's optimizers keeps of a parameter once it has taken a step: seen on a small one."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return {}
    small = torch.zeros([2] * parameter.dim(), dtype=parameter.dtype, device="cpu", requires_grad=True)
    small.grad = torch.zeros_like(small)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    try:
        twin = kind([{**options, "params": [small]}])
        twin.step()
    except Exception:  # one that needs more than that, such as a closure, says nothing of what it keeps
        return {}
    return {
        key: _State(value.dtype, parameter.dim() > 0 and value.shape == small.shape)
        if isinstance(value, torch.Tensor)
        else _State(None, False)
        for key, value in twin.state[small].items()
    }


def _misfit(
    name: str, state: _State, tensors: Mapping[str, Any], scalars: Mapping[str, Any], shape: tuple[int, ...]
) -> list[str]:
    saved = tensors.get(name)
    if saved is None:
        return [] if name in scalars else [f"{name!r} is missing"]
    if state.like_parameter and tuple(saved.shape) != shape:
        return [f"{name!r} is of shape {tuple(saved.shape)} in the checkpoint, its parameter of {shape} in the model"]
    if state.dtype is not None and not torch.can_cast(saved.dtype, state.dtype):
        return [f"{name!r} is {saved.dtype} in the checkpoint, {state.dtype} in the optimizer"]
    return []


def _unlike(saved: Any, now: Mapping[str, Any], what: str) -> list[str]:
    """Options whose kinds differ from those that the optimizer has."""
    if not isinstance(saved, dict):
        return [f"{what} is {saved!r}"]
    return [
        f"{what}: {key!r} is {saved[key]!r} in the checkpoint, {now[key]!r} in the optimizer"
        for key in saved
        if key in now and key != "params" and not _alike(saved[key], now[key])
    ]


def _alike(saved: Any, now: Any) -> bool:
    if saved is None or now is None:
        return True
    if isinstance(now, (tuple, list)):
        return isinstance(saved, list) and len(saved) == len(now) and all(map(_alike, saved, now))
    if isinstance(now, _NUMBERS):
        return isinstance(saved, (*_NUMBERS, TensorName))
    return isinstance(saved, type(now))


def _as_now(saved: Any, now: Any) -> Any:
    """Return a saved option as the optimizer has it now: a tuple or a list, a tensor on its device or a number."""
    if isinstance(saved, list):
        parts = now if isinstance(now, (tuple, list)) and len(now) == len(saved) else [None] * len(saved)
        return (list if isinstance(now, list) else tuple)(map(_as_now, saved, parts))
    if isinstance(now, torch.Tensor) and isinstance(saved, _NUMBERS):
        dtype = saved.dtype if isinstance(saved, torch.Tensor) else now.dtype
        return torch.as_tensor(saved, dtype=dtype, device=now.device)
    if isinstance(saved, torch.Tensor) and isinstance(now, (bool, int, float)) and saved.numel() == 1:
        return saved.item()
    return saved


def restore_optimizer(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, convert_dtype: bool
) -> list[str]:
    """Put the optimizer's state back; the names of what belongs to no parameter."""
    for group, values in zip(optimizer.param_groups, checkpoint.values[GROUPS], strict=True):
        group.update({key: _as_now(value, group.get(key)) for key, value in values.items() if key != "params"})
    parameters = dict(model.named_parameters())
    entries = below("optimizer/", checkpoint.tensors) | checkpoint.values[SCALARS]
    optimizer.state.clear()
    unused = []
    for name, value in entries.items():
        owner, _, key = name.rpartition("/")
        if owner not in parameters:
            unused.append(name)
            continue
        parameter = parameters[owner]

        # State without dimensions stays on the CPU, as Adam's step count, unless the parameter has none either.
        def placed(tensor: torch.Tensor, like: torch.Tensor = parameter, counts: bool = key in _COUNTS) -> torch.Tensor:
            if not tensor.dim() and (like.dim() or counts):
                return tensor
            converts = convert_dtype and tensor.is_floating_point()
            return tensor.to(like.device, like.dtype if converts else tensor.dtype)

        optimizer.state[parameter][key] = tree_map_only(torch.Tensor, placed, value)
    split = split_of(optimizer)
    if split is not None:
        split.assign_owners(optimizer)
    return unused
