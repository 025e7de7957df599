"""A module, its optimizer and the random number generators as named tensors and plain values, and back.

Optimizer state goes by the parameter's name, not its number, so that it fits whatever order the parameters come in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.reading import Checkpoint, LayoutOf, compare, load_newest
from distconv.checkpoint.writing import save
from distconv.distribution import Distribution
from distconv.errors import CheckpointError
from distconv.parameters.optimizer_state import split_of
from distconv.tensor import DistTensor

Tensors = dict[str, torch.Tensor]

_USER = "user"
"""Where the values of a user's own loop are."""


class Loaded(NamedTuple):
    """What :func:`load_checkpoint` found."""

    step: int
    values: dict[str, Any]
    """Those that were given to :func:`save_checkpoint`."""
    missing: tuple[str, ...] = ()
    """Tensors of the model that the checkpoint lacks; they are as they were."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the checkpoint that nothing wanted, of the model or of the optimizer."""
    skipped: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, in place of which this one was read."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, Any] | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    keep: int = 2,
) -> Path:
    """Write model, optimizer, random numbers and ``values`` (what JSON can carry) as this step's checkpoint.

    Collective: all ranks of ``comm`` (default: all of the job) take part, and each writes what it alone has of sharded
    weights. The newest ``keep`` checkpoints stay. Returns the folder. :class:`Saving` does it beside the training that
    goes on::

        dc.save_checkpoint("run", step, model, optimizer, {"scheduler": scheduler.state_dict()})

    Raises
    ------
    CheckpointError
        On all ranks, if it could not be written, or a value is none that JSON can carry; earlier ones are intact.
    """
    comm = comm or MPI.COMM_WORLD
    tensors, own = capture(model, optimizer, comm)
    return save(directory, step, tensors, {**own, _USER: dict(values or {})}, comm, keep=keep)


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    comm: MPI.Intracomm | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    fallback: bool = False,
) -> Loaded | None:
    """Put the newest finished checkpoint below ``directory`` into model and optimizer, bit for bit. Collective.

    Any number of ranks and any grid reads what any other wrote, each rank the blocks that it has; with as many ranks
    the random numbers go on, too. Returns the step and the values that were saved with it, or None if there is no
    checkpoint.

    strict
        False: names may be missing or unexpected, which the result lists; of another optimizer nothing is taken.
    convert_dtype
        Let dtypes differ: what is read gets the model's.
    fallback
        Where the newest is damaged take the newest that is whole; the result says why.

    Raises
    ------
    CheckpointError
        On all ranks, if it is damaged or of another model or optimizer; nothing has been changed then.
    """
    comm = comm or MPI.COMM_WORLD
    found = load_newest(directory, comm, layouts_of(model), fallback=fallback)
    if found is None:
        return None
    missing, unexpected = restore(found, model, optimizer, comm, strict=strict, convert_dtype=convert_dtype)
    return Loaded(found.step, found.values.get(_USER, {}), missing, unexpected, found.skipped)


def layouts_of(model: torch.nn.Module) -> LayoutOf:
    """How ``load`` is to read a checkpoint for ``model``: sharded parameters, and their optimizer state, by blocks."""
    named = model.named_parameters(remove_duplicate=False)
    sharded = {name: p for name, p in named if isinstance(p, DistTensor)}

    def layout_of(name: str, shape: Sequence[int]) -> Distribution | None:
        kind, _, rest = name.partition("/")
        parameter = sharded.get(rest if kind == "model" else rest.rpartition("/")[0])
        return parameter.dist if parameter is not None and parameter.shape == tuple(shape) else None

    return layout_of


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm
) -> tuple[Tensors, dict[str, Any]]:
    """The state of all of them: tensors, sharded ones as they are, and values for JSON. Collective."""
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    moments, scalars = _optimizer_state(model, optimizer)
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    for name, state in _random_states(model).items():
        states = comm.gather(state.numpy(), root=0) or []
        tensors[f"random/{name}"] = torch.from_numpy(np.array(states, dtype=np.uint8))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "optimizer_scalars": scalars}


def restore(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    comm: MPI.Intracomm,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Put the state back, bit for bit; what is missing and what was unexpected, without ``strict``. Collective.

    With another number of ranks than it was saved from, every rank takes rank 0's random numbers.

    Raises
    ------
    CheckpointError
        If it is of another model or optimizer; nothing has been changed then.
    """
    what = f"checkpoint of step {checkpoint.step}"
    found, wanted = _below("model/", checkpoint.tensors), model.state_dict(keep_vars=True)
    compare(found, wanted, what, strict=strict, convert_dtype=convert_dtype)
    other = _other_optimizer(checkpoint, optimizer)
    if strict and other:
        raise CheckpointError(f"{what} {other}")
    beside = {name: found[name].to(wanted[name].device) for name in wanted if name in found}
    model.load_state_dict(beside, strict=strict)
    unused = list(_below("optimizer/", checkpoint.tensors))
    if not other:
        for group, values in zip(optimizer.param_groups, checkpoint.values["groups"], strict=True):
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
        unused = _restore_optimizer(checkpoint, model, optimizer, convert_dtype=convert_dtype)
    for name in _random_states(model):
        if f"random/{name}" in checkpoint.tensors:
            random = checkpoint.tensors[f"random/{name}"]
            _set_random_state(model, name, random[comm.rank if len(random) == comm.size else 0].clone())
    unexpected = [f"model/{name}" for name in found if name not in wanted] + [f"optimizer/{name}" for name in unused]
    return tuple(f"model/{name}" for name in wanted if name not in found), tuple(unexpected)


def _other_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> str:
    """How that of the checkpoint differs; empty if it does not."""
    saved, groups = checkpoint.values["optimizer"], checkpoint.values["groups"]
    if saved != type(optimizer).__name__:
        return f"is of {saved}, not of {type(optimizer).__name__}"
    if len(groups) != len(optimizer.param_groups):
        return f"has {len(groups)} parameter groups, not {len(optimizer.param_groups)}"
    return ""


def _random_states(model: torch.nn.Module) -> Tensors:
    """State of each generator that this rank draws from: the CPU's, and that of the GPU the model is on."""
    found = {"torch": torch.get_rng_state()}
    device = _gpu(model)
    return found if device is None else {**found, "cuda": torch.cuda.get_rng_state(device)}


def _set_random_state(model: torch.nn.Module, name: str, state: torch.Tensor) -> None:
    device = _gpu(model)
    if name == "cuda" and device is not None:
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _gpu(model: torch.nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    scalars: dict[str, Any] = {}
    split = split_of(optimizer)
    state = optimizer.state if split is None else split.whole(optimizer)
    for name, parameter in model.named_parameters():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars[f"{name}/{key}"] = value
    return tensors, scalars


def _restore_optimizer(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, convert_dtype: bool
) -> list[str]:
    """Put the optimizer's state back; the names of what belongs to no parameter."""
    parameters = dict(model.named_parameters())
    found = _below("optimizer/", checkpoint.tensors) | checkpoint.values["optimizer_scalars"]
    optimizer.state.clear()
    unused = []
    for name, value in found.items():
        owner, _, key = name.rpartition("/")
        if owner not in parameters:
            unused.append(name)
            continue
        # torch keeps Adam's step count on the CPU, the rest beside the parameter.
        if isinstance(value, torch.Tensor) and value.dim():
            converts = convert_dtype and value.is_floating_point()
            value = value.to(parameters[owner].device, parameters[owner].dtype if converts else value.dtype)
        optimizer.state[parameters[owner]][key] = value
    split = split_of(optimizer)
    if split is not None:
        split.deal(optimizer)
    return unused
