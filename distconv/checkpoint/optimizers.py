"""State of an optimizer by the names of its parameters: capture, comparison and restoration.

State is stored by name, not by index, so it does not depend on the order of the parameters. :mod:`.state` calls this
module, which does not depend on the layout of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from distconv.checkpoint.reading import Checkpoint, CheckpointMetadata
from distconv.checkpoint.values import TensorName
from distconv.errors import CheckpointError
from distconv.parameters.optimizer_state import split_of

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")

OPTIMIZER, GROUPS, SCALARS = "optimizer", "groups", "optimizer_scalars"
"""Keys of a checkpoint's values: the optimizer's class, its parameter groups and its plain state."""

_NUMBERS = (bool, int, float, torch.Tensor)


def select_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries whose names begin with a prefix, under the rest of their names.

    Parameters
    ----------
    prefix : str
        Such as ``"model/"``.
    tensors : mapping of str to object
        The entries.

    Returns
    -------
    dict
        The selected entries, in the same order.
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Tensors, dict[str, Any]]:
    """Return the state of an optimizer by the names of its parameters.

    Collective if the optimizer's state is sharded: call on every rank.

    Parameters
    ----------
    model : Module
        The model with the optimizer's parameters.
    optimizer : Optimizer or None
        The optimizer.

    Returns
    -------
    dict of str to Tensor
        State tensors under ``PARAMETER/KEY``.
    dict of str to object
        Class, groups and plain state, for JSON.
    """
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


def describe_optimizer_mismatch(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Return how the optimizer of a checkpoint differs from the given optimizer, in class and number of groups.

    Parameters
    ----------
    values : mapping of str to object
        Values of the checkpoint.
    optimizer : Optimizer
        The optimizer to be restored.

    Returns
    -------
    str
        A phrase that follows "checkpoint ..."; "" if there is no difference.
    """
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


def check_optimizer_state(
    contents: CheckpointMetadata | Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, what: str
) -> None:
    """Check that the optimizer can take its next step with the state in a checkpoint.

    Parameters
    ----------
    contents : CheckpointMetadata or Checkpoint
        The checkpoint.
    model, optimizer
        The model and its optimizer.
    what : str
        The checkpoint; the error begins with it.

    Raises
    ------
    CheckpointError
        If it cannot; the error lists all differences.
    """
    wrong = []
    for number, (saved, group) in enumerate(zip(contents.values[GROUPS], optimizer.param_groups, strict=True)):
        wrong += _describe_option_changes(saved, group, f"parameter group {number}")
    tensors, scalars = select_prefix("optimizer/", contents.tensors), contents.values[SCALARS]
    owners = {name.rpartition("/")[0] for name in (*tensors, *scalars)}
    # By identity: a parameter that has several names belongs to one group.
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    needed: dict[tuple[int, int, torch.dtype], dict[str, _StateSpec]] = {}
    for name, parameter in model.named_parameters():
        # A parameter without any state has not taken a step: the optimizer initializes it at the next one.
        if name not in owners or id(parameter) not in group_of:
            continue
        group = group_of[id(parameter)]
        # The form of the state depends on nothing else, so one probe serves all parameters of a kind.
        kind = (id(group), parameter.dim(), parameter.dtype)
        if kind not in needed:
            needed[kind] = _expected_state(optimizer, group, parameter)
        for key, state in needed[kind].items():
            wrong += _describe_misfits(f"{name}/{key}", state, tensors, scalars, tuple(parameter.shape))
    if wrong:
        raise CheckpointError(f"{what} does not fit its optimizer, {len(wrong)} differences: {'; '.join(wrong)}")


class _StateSpec(NamedTuple):
    """Form of the state that an optimizer keeps for a parameter under one key."""

    dtype: torch.dtype | None
    """Dtype of a tensor; None for other values."""
    like_parameter: bool
    """True if it has the parameter's shape. Otherwise its shape does not depend on the parameter."""


_SCALAR_STATE = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers without dimensions, whose dtype and device do not depend on the parameter."""


def _expected_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, _StateSpec]:
    """Return the state that one of torch's optimizers keeps after a step, found by a step on a small parameter."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return {}
    # Two elements in each dimension, so that a state of the parameter's shape differs from a single value.
    small = torch.zeros([2] * parameter.dim(), dtype=parameter.dtype, device="cpu", requires_grad=True)
    small.grad = torch.zeros_like(small)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    try:
        probe = kind([{**options, "params": [small]}])
        probe.step()
    except Exception:  # optimizers that need more, such as a closure, are not checked
        return {}
    return {
        key: _StateSpec(value.dtype, parameter.dim() > 0 and value.shape == small.shape)
        if isinstance(value, torch.Tensor)
        else _StateSpec(None, False)
        for key, value in probe.state[small].items()
    }


def _describe_misfits(
    name: str, state: _StateSpec, tensors: Mapping[str, Any], scalars: Mapping[str, Any], shape: tuple[int, ...]
) -> list[str]:
    saved = tensors.get(name)
    if saved is None:
        return [] if name in scalars else [f"{name!r} is missing"]
    if state.like_parameter and tuple(saved.shape) != shape:
        return [f"{name!r} is of shape {tuple(saved.shape)} in the checkpoint, its parameter of {shape} in the model"]
    if state.dtype is not None and not torch.can_cast(saved.dtype, state.dtype):
        return [f"{name!r} is {saved.dtype} in the checkpoint, {state.dtype} in the optimizer"]
    return []


def _describe_option_changes(saved: Any, now: Mapping[str, Any], what: str) -> list[str]:
    """Return a description of each option that is of another kind than the optimizer's."""
    if not isinstance(saved, dict):
        return [f"{what} is {saved!r}"]
    return [
        f"{what}: {key!r} is {saved[key]!r} in the checkpoint, {now[key]!r} in the optimizer"
        for key in saved
        if key in now and key != "params" and not _is_same_kind(saved[key], now[key])
    ]


def _is_same_kind(saved: Any, now: Any) -> bool:
    if saved is None or now is None:
        return True
    if isinstance(now, (tuple, list)):
        return isinstance(saved, list) and len(saved) == len(now) and all(map(_is_same_kind, saved, now))
    if isinstance(now, _NUMBERS):
        return isinstance(saved, (*_NUMBERS, TensorName))
    return isinstance(saved, type(now))


def _match_option(saved: Any, now: Any) -> Any:
    """Return a saved option in the optimizer's form: tuple or list, number or tensor on its device."""
    if isinstance(saved, list):
        parts = now if isinstance(now, (tuple, list)) and len(now) == len(saved) else [None] * len(saved)
        return (list if isinstance(now, list) else tuple)(map(_match_option, saved, parts))
    if isinstance(now, torch.Tensor) and isinstance(saved, _NUMBERS):
        dtype = saved.dtype if isinstance(saved, torch.Tensor) else now.dtype
        return torch.as_tensor(saved, dtype=dtype, device=now.device)
    if isinstance(saved, torch.Tensor) and isinstance(now, (bool, int, float)) and saved.numel() == 1:
        return saved.item()
    return saved


def restore_optimizer(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, convert_dtype: bool
) -> list[str]:
    """Restore the optimizer's state.

    Parameters
    ----------
    checkpoint : Checkpoint
        A checkpoint that :func:`check_optimizer_state` accepts.
    model, optimizer
        The model and its optimizer.
    convert_dtype : bool
        True converts floating-point state to the parameter's dtype. Otherwise it keeps the saved dtype.

    Returns
    -------
    list of str
        Names of saved state that belongs to no parameter.
    """
    # Nothing raises from here on: what does not fit was found before.
    for group, values in zip(optimizer.param_groups, checkpoint.values[GROUPS], strict=True):
        group.update({key: _match_option(value, group.get(key)) for key, value in values.items() if key != "params"})
    parameters = dict(model.named_parameters())
    entries = select_prefix("optimizer/", checkpoint.tensors) | checkpoint.values[SCALARS]
    optimizer.state.clear()
    unused = []
    for name, value in entries.items():
        owner, _, key = name.rpartition("/")
        if owner not in parameters:
            unused.append(name)
            continue
        parameter = parameters[owner]

        # State without dimensions stays on the CPU, as torch keeps Adam's step count, unless the parameter has no
        # dimensions either.
        # Default arguments keep the values of this iteration.
        def placed(
            tensor: torch.Tensor, like: torch.Tensor = parameter, counts: bool = key in _SCALAR_STATE
        ) -> torch.Tensor:
            if not tensor.dim() and (like.dim() or counts):
                return tensor
            converts = convert_dtype and tensor.is_floating_point()
            return tensor.to(like.device, like.dtype if converts else tensor.dtype)

        optimizer.state[parameter][key] = tree_map_only(torch.Tensor, placed, value)
    split = split_of(optimizer)
    # Each rank has restored all state, and drops that of parameters which other ranks own.
    if split is not None:
        split.assign_owners(optimizer)
    return unused
