"""A module, its optimizer and the random number generators as named tensors and plain values, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.manifest import nothing_in
from distconv.checkpoint.optimizers import (
    below,
    check_state,
    optimizer_state,
    other_optimizer,
    restore_optimizer,
)
from distconv.checkpoint.reading import Checkpoint, Contents, LayoutOf, compare, load_newest
from distconv.checkpoint.writing import save
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.distribution import Distribution
from distconv.errors import CheckpointError
from distconv.parallel import training_comm
from distconv.parameters.replicas import check_tensors
from distconv.process import watchdog
from distconv.tensor import DistTensor

Tensors = dict[str, torch.Tensor]

_MODEL, _AVERAGE = "model/", "average/"
_USER = "user"
"""Where the values of a user's own loop are."""
EXTRA = "extra_state"
"""Where what modules' ``get_extra_state`` returned is that is not a tensor."""


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
    optimizer: torch.optim.Optimizer | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    keep: int = 2,
) -> Path:
    """Write model, optimizer (if any), random numbers and ``values`` as this step's checkpoint.

    Collective over ``comm`` (default: the ranks that ``model`` was parallelized over, otherwise all ranks of the job).
    Each rank writes what it alone has of sharded weights. Returns the folder. :class:`Saving` writes while training
    continues::

        dc.save_checkpoint("run", step, model, optimizer, {"scheduler": scheduler.state_dict()})

    Parameters
    ----------
    directory
        Folder of the run's checkpoints, made if need be.
    step
        Number of the step. Rank 0 warns if it is below that of the last commit.
    model, optimizer
        What is saved; ``get_extra_state`` of the model's modules, too.
    values
        What is saved besides: numbers, strings, tensors, and lists and dictionaries of them. Rank 0's are saved.
        Tensors come back whole and on the CPU, tuples as lists.
    comm
        Ranks that take part.
    keep
        Number of checkpoints that stay in ``directory``. Once this one is committed, **older ones are deleted**, all
        but the last ``keep`` that are whole: by default the last two stay. A large number keeps all.

    Raises
    ------
    CheckpointError
        On all ranks, if it could not be written, a value cannot be saved, or ``keep`` is below 0; earlier ones are
        intact.
    """
    comm = comm or training_comm(model)
    check_same_on_all_ranks(comm, "save_checkpoint", f"step {step} in {directory}")
    try_on_all_ranks(comm, lambda: _check_values(values), CheckpointError)
    tensors, own = capture(model, optimizer, comm)
    return save(directory, step, tensors, {**own, _USER: dict(values or {})}, comm, keep=keep)


def _check_values(values: object) -> None:
    if not isinstance(values or {}, Mapping):
        raise CheckpointError(
            f"save_checkpoint: values is a {type(values).__name__}. Pass a dictionary, {{'schedule': ...}}."
        )


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    fallback: bool = False,
    missing_ok: bool = False,
) -> Loaded | None:
    """Put what was committed last below ``directory`` into model and optimizer, bit for bit.

    Collective over ``comm``; default: the ranks that ``model`` was parallelized over, else all of the job.
    Any number of ranks and any grid reads what any other wrote, each rank the blocks that it has; with as many ranks
    the random numbers go on, too. Returns the step and the values that were saved with it. Without an ``optimizer``
    the model and the random numbers alone are taken.

    strict
        False: names may be missing or unexpected, which the result lists; of another optimizer nothing is taken.
    convert_dtype
        Let dtypes differ: what is read gets the model's.
    fallback
        Where the newest is damaged take the newest that is whole; the result says why.
    missing_ok
        Return None where there is no finished checkpoint, as in the first start of a job that goes on by itself.

    Raises
    ------
    CheckpointError
        On all ranks, if there is none, it is damaged, or of another model or optimizer; nothing has been changed then.
    """
    comm = comm or training_comm(model)
    check_same_on_all_ranks(
        comm, "load_checkpoint", f"{directory}, {strict=}, {convert_dtype=}, {fallback=}, {missing_ok=}"
    )

    def check(contents: Contents) -> None:
        check_fits(contents, model, optimizer, strict=strict, convert_dtype=convert_dtype)

    loaded = load_newest(directory, comm, layouts_of(model), check, fallback=fallback)
    if loaded is None and missing_ok:
        return None
    if loaded is None:
        with watchdog.waiting(lambda: "looking for a checkpoint"):
            reason = comm.bcast(nothing_in(directory) if comm.rank == 0 else "")
        raise CheckpointError(f"{reason}; with missing_ok=True that is none, and the job starts anew")
    missing, unexpected = restore(loaded, model, optimizer, comm, strict=strict, convert_dtype=convert_dtype)
    return Loaded(loaded.step, loaded.values.get(_USER, {}), missing, unexpected, loaded.skipped)


def layouts_of(model: torch.nn.Module) -> LayoutOf:
    """How ``load`` is to read a checkpoint for ``model``: sharded parameters, and their optimizer state, by blocks."""
    named = model.named_parameters(remove_duplicate=False)
    sharded = {name: p for name, p in named if isinstance(p, DistTensor)}

    def layout_of(name: str, shape: Sequence[int]) -> Distribution | None:
        kind, _, rest = name.partition("/")
        parameter = sharded.get(rest if f"{kind}/" in (_MODEL, _AVERAGE) else rest.rpartition("/")[0])
        return parameter.dist if parameter is not None and parameter.shape == tuple(shape) else None

    return layout_of


def capture(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, comm: MPI.Intracomm
) -> tuple[Tensors, dict[str, Any]]:
    """The state of all of them: tensors, sharded ones as they are, and values for JSON. Collective."""
    state, extra = _state_of(model)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in state.items()}
    moments, values = optimizer_state(model, optimizer)
    if extra:
        values[EXTRA] = extra
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    # One rank's copy is written, so a difference would be lost. Ranks may have random-number states of their own.
    check_tensors(tensors, comm, "save_checkpoint")
    for name, own in _random_states(model).items():
        with watchdog.waiting(lambda: "random numbers of all ranks"):
            states = comm.gather(own.numpy(), root=0) or []
        tensors[f"random/{name}"] = torch.from_numpy(np.array(states, dtype=np.uint8))
    return tensors, values


def _state_of(model: torch.nn.Module) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a model's state dict, and what else modules' ``get_extra_state`` put there. Collective."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def restore(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
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
    check_fits(checkpoint, model, optimizer, strict=strict, convert_dtype=convert_dtype)
    saved, (wanted, extra) = below("model/", checkpoint.tensors), _state_of(model)
    saved_extra = checkpoint.values.get(EXTRA, {})
    what = f"checkpoint of step {checkpoint.step}"

    def converted() -> tuple[Tensors, Tensors]:
        beside = {name: as_dtype(saved[name], wanted[name], name, what) for name in wanted if name in saved}
        return beside, _random_numbers(checkpoint, model, comm)

    beside, random = try_on_all_ranks(comm, converted, CheckpointError)
    beside |= {name: value for name, value in saved_extra.items() if name in extra}
    model.load_state_dict(beside, strict=strict)
    unused = list(below("optimizer/", checkpoint.tensors))
    if optimizer is not None and not other_optimizer(checkpoint.values, optimizer):
        unused = restore_optimizer(checkpoint, model, optimizer, convert_dtype=convert_dtype)
    for name, state in random.items():
        _set_random_state(model, name, state)
    had, has = {**saved, **saved_extra}, {**wanted, **extra}
    unexpected = [f"model/{name}" for name in had if name not in has] + [f"optimizer/{name}" for name in unused]
    return tuple(f"model/{name}" for name in has if name not in had), tuple(unexpected)


def capture_average(average: torch.optim.swa_utils.AveragedModel) -> Tensors:
    """The tensors of a moving average of the weights, beside those of :func:`capture`. Collective."""
    return {f"{_AVERAGE}{name}": tensor.detach() for name, tensor in _state_of(average.module)[0].items()}


def restore_average(checkpoint: Checkpoint, average: torch.optim.swa_utils.AveragedModel) -> None:
    """Put it back, bit for bit; it is one of as many steps as were taken.

    Raises
    ------
    CheckpointError
        If the checkpoint has none of this model; nothing has been changed then.
    """
    saved, what = below(_AVERAGE, checkpoint.tensors), f"the average in checkpoint of step {checkpoint.step}"
    wanted, extra = _state_of(average.module)
    compare(saved, wanted, what)
    average.module.load_state_dict({**saved, **extra})  # averages have none of that
    average.n_averaged.fill_(checkpoint.step)


def averaged(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the moving average of the weights, where it has one, in place of the weights."""
    saved = below(_AVERAGE, checkpoint.tensors)
    weights = {f"{_MODEL}{name}": tensor for name, tensor in saved.items()}
    return replace(checkpoint, tensors=checkpoint.tensors | weights)


def check_fits(
    contents: Contents | Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> None:
    """Refuse what is of another model or optimizer, by what a checkpoint says of its tensors.

    Raises
    ------
    CheckpointError
        If it is; the text lists all differences.
    """
    what = f"checkpoint of step {contents.step}"
    wanted, extra = _state_of(model)
    compare(below("model/", contents.tensors), wanted, what, strict=strict, convert_dtype=convert_dtype)
    other_extra = sorted(contents.values.get(EXTRA, {}).keys() ^ extra.keys())
    if other_extra and strict:
        raise CheckpointError(
            f"{what} does not fit: one of checkpoint and model has no {', '.join(map(repr, other_extra))}, which "
            "get_extra_state returns. Load it with strict=False, or into the same model."
        )
    if optimizer is None:
        return
    other = other_optimizer(contents.values, optimizer)
    if other and strict:
        raise CheckpointError(f"{what} {other}")
    if not other:
        check_state(contents, model, optimizer, what)


def as_dtype(saved: torch.Tensor, wanted: torch.Tensor, name: str, what: str) -> torch.Tensor:
    """``saved`` with the dtype of ``wanted``, beside it.

    Raises
    ------
    CheckpointError
        If it has values that are too large for that.
    """
    values = saved.to(wanted.device, wanted.dtype)
    if values.dtype != saved.dtype:
        before, after = (x.local if isinstance(x, DistTensor) else x for x in (saved, values))
        if (torch.isfinite(before).to(after.device) & ~torch.isfinite(after)).any():
            raise CheckpointError(f"{what}: {name!r} has values of {saved.dtype} that {values.dtype} cannot hold")
    return values


def _random_numbers(checkpoint: Checkpoint, model: torch.nn.Module, comm: MPI.Intracomm) -> Tensors:
    """The state of each of this rank's generators that the checkpoint has."""
    states = {}
    for name, now in _random_states(model).items():
        saved = checkpoint.tensors.get(f"random/{name}")
        if saved is None:
            continue
        if saved.dtype != now.dtype or saved.dim() != 2 or not len(saved) or saved.shape[1] != len(now):
            raise CheckpointError(
                f"checkpoint of step {checkpoint.step}: 'random/{name}' is {saved.dtype} {tuple(saved.shape)}, but a "
                f"generator's state has {len(now)} bytes"
            )
        states[name] = saved[comm.rank if len(saved) == comm.size else 0].clone()
        if name == "torch":
            torch.Generator().set_state(states[name])  # refuses what is none
    return states


def _random_states(model: torch.nn.Module) -> Tensors:
    """State of each generator that this rank draws from: the CPU's, and that of the GPU the model is on."""
    states = {"torch": torch.get_rng_state()}
    device = _gpu(model)
    return states if device is None else {**states, "cuda": torch.cuda.get_rng_state(device)}


def _set_random_state(model: torch.nn.Module, name: str, state: torch.Tensor) -> None:
    device = _gpu(model)
    if name == "cuda" and device is not None:
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _gpu(model: torch.nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
