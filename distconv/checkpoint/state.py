"""A module, its optimizer and the random number generators as named tensors and plain values, and back.

Optimizer state goes by the parameter's name, not its number, so that it fits whatever order the parameters come in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.manifest import newest
from distconv.checkpoint.reading import Checkpoint, compare, load
from distconv.checkpoint.writing import save
from distconv.errors import CheckpointError
from distconv.parameters.optimizer_state import split_of

Tensors = dict[str, torch.Tensor]

_USER = "user"
"""Where the values of a user's own loop are."""


class Loaded(NamedTuple):
    """What :func:`load_checkpoint` found."""

    step: int
    values: dict[str, Any]
    """Those that were given to :func:`save_checkpoint`."""


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
) -> Loaded | None:
    """Put the newest finished checkpoint below ``directory`` into model and optimizer, bit for bit. Collective.

    Any number of ranks and any grid reads what any other wrote; with as many ranks the random numbers go on, too.
    Returns the step and the values that were saved with it, or None if there is no checkpoint.

    Raises
    ------
    CheckpointError
        On all ranks, if it is damaged or of another model or optimizer; nothing has been changed then.
    """
    comm = comm or MPI.COMM_WORLD
    folder: Path | None = newest(directory, comm)
    if folder is None:
        return None
    found = load(folder, comm)
    restore(found, model, optimizer, comm)
    return Loaded(found.step, found.values.get(_USER, {}))


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
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm
) -> None:
    """Put the state back, bit for bit.

    With another number of ranks than it was saved from, every rank takes rank 0's random numbers.

    Raises
    ------
    CheckpointError
        If it is of another model or optimizer; nothing has been changed then.
    """
    found = _below("model/", checkpoint.tensors)
    compare(found, model.state_dict(), f"checkpoint of step {checkpoint.step}")
    saved = checkpoint.values["optimizer"]
    if saved != type(optimizer).__name__:
        raise CheckpointError(f"checkpoint of step {checkpoint.step} is of {saved}, not of {type(optimizer).__name__}")
    groups = checkpoint.values["groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(f"checkpoint of step {checkpoint.step} has {len(groups)} parameter groups")
    model.load_state_dict(found)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    _restore_optimizer(checkpoint, model, optimizer)
    for name in _random_states(model):
        if f"random/{name}" in checkpoint.tensors:
            random = checkpoint.tensors[f"random/{name}"]
            _set_random_state(model, name, random[comm.rank if len(random) == comm.size else 0].clone())


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


def _restore_optimizer(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, tensor in _below("optimizer/", checkpoint.tensors).items():
        owner, _, key = name.rpartition("/")
        # torch keeps Adam's step count on the CPU, the rest beside the parameter.
        device = parameters[owner].device if tensor.dim() else tensor.device
        optimizer.state[parameters[owner]][key] = tensor.to(device)
    for name, value in checkpoint.values["optimizer_scalars"].items():
        owner, _, key = name.rpartition("/")
        optimizer.state[parameters[owner]][key] = value
    split = split_of(optimizer)
    if split is not None:
        split.deal(optimizer)
