"""State of a training run as named tensors and plain values: model, optimizer and random number generators.

Users call :func:`save_checkpoint` and :func:`load_checkpoint`; jobs call the functions below them. The files are
written and read by :mod:`.writing` and :mod:`.reading`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.manifest import describe_missing
from distconv.checkpoint.optimizers import (
    check_optimizer_state,
    describe_optimizer_mismatch,
    optimizer_state,
    restore_optimizer,
    select_prefix,
)
from distconv.checkpoint.reading import Checkpoint, CheckpointMetadata, LayoutResolver, check_tensors_fit, load_newest
from distconv.checkpoint.writing import save
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.distribution import Distribution
from distconv.errors import CheckpointError, MismatchError
from distconv.parallel import training_comm
from distconv.parameters.replicas import check_tensors
from distconv.process import watchdog
from distconv.tensor import DistTensor

Tensors = dict[str, torch.Tensor]

_MODEL, _AVERAGE = "model/", "average/"
_USER = "user"
"""Key of the values of a user's own loop."""
EXTRA = "extra_state"
"""Key of the results of modules' ``get_extra_state`` that are not tensors."""


class Loaded(NamedTuple):
    """Result of :func:`load_checkpoint`."""

    step: int
    values: dict[str, Any]
    """The values that were passed to :func:`save_checkpoint`."""
    missing: tuple[str, ...] = ()
    """Tensors of the model that the checkpoint lacks; they are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the checkpoint that neither model nor optimizer has."""
    skipped: tuple[str, ...] = ()
    """Errors of newer checkpoints that are damaged, and were skipped for this one."""


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
    """Write model, optimizer (if any), random number states and ``values`` as the checkpoint of this step.

    Collective: call on every rank of ``comm``. Each rank writes its own blocks of sharded weights. :class:`AsyncSave`
    writes while training continues::

        dc.save_checkpoint("run", step, model, optimizer, {"scheduler": scheduler.state_dict()})

    Parameters
    ----------
    directory : str or path-like
        Folder of the run's checkpoints; it is created if needed.
    step : int
        Number of the step. Rank 0 warns if it is below that of the last commit.
    model : Module
        The model, with the results of its modules' ``get_extra_state``.
    optimizer : Optimizer, optional
        The optimizer.
    values : mapping of str to object, optional
        Further values: numbers, strings, tensors, and lists and dictionaries of them. Rank 0's are saved.
        Tensors are loaded in full and on the CPU, tuples as lists.
    comm : MPI.Intracomm, optional
        Ranks that take part. Default: the ranks that ``model`` was parallelized over, otherwise all ranks of the job.
    keep : int
        Number of checkpoints that stay in ``directory``. Once this one is committed, **older ones are deleted**, all
        but the last ``keep`` that are intact: by default the last two stay. A large number keeps all.

    Returns
    -------
    Path
        Folder of the checkpoint.

    Raises
    ------
    CheckpointError
        On all ranks, if it could not be written, a value cannot be saved, or ``keep`` is below 0; earlier ones are
        intact.
    MismatchError
        On all ranks, if tensors differ between ranks, or rank 0 lacks some.

    Examples
    --------
    >>> dc.save_checkpoint("runs/mine", step, model, optimizer)   # doctest: +SKIP
    """
    comm = comm or training_comm(model)
    check_same_on_all_ranks(comm, "save_checkpoint", f"step {step} in {directory}")
    try_on_all_ranks(comm, lambda: _check_values(values), CheckpointError)
    tensors, own = capture_state(model, optimizer, comm)
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
    """Load the checkpoint that was committed last below ``directory`` into model and optimizer, bit for bit.

    Collective: call on every rank of ``comm``. Checkpoints are independent of the process grid: each rank reads its own
    blocks. With the same number of ranks the random number generators continue, too. Without an ``optimizer`` only the
    model and the random number states are loaded.

    Parameters
    ----------
    directory : str or path-like
        Folder of the run's checkpoints.
    model : Module
        The model to load into.
    optimizer : Optimizer, optional
        The optimizer to load into.
    comm : MPI.Intracomm, optional
        Ranks that take part. Default: the ranks that ``model`` was parallelized over, otherwise all ranks of the job.
    strict : bool
        True raises if names are missing or unexpected, or the optimizer is another one. Otherwise the result lists the
        names, and nothing is loaded from another optimizer.
    convert_dtype : bool
        True converts tensors to the model's dtypes. Otherwise other dtypes raise.
    fallback : bool
        True loads the newest intact checkpoint if newer ones are damaged; the result lists their errors. Otherwise a
        damaged one raises.
    missing_ok : bool
        True returns None if there is no finished checkpoint, as at the first start of a job that resumes by itself.
        Otherwise that raises.

    Returns
    -------
    Loaded or None
        The step, and the values that were saved with it.

    Raises
    ------
    CheckpointError
        On all ranks, if there is no checkpoint, it is damaged, or of another model or optimizer. Nothing has been
        changed then.

    Examples
    --------
    >>> found = dc.load_checkpoint("runs/mine", model, optimizer, missing_ok=True)   # doctest: +SKIP
    >>> start = 0 if found is None else found.step                                   # doctest: +SKIP
    """
    comm = comm or training_comm(model)
    check_same_on_all_ranks(
        comm, "load_checkpoint", f"{directory}, {strict=}, {convert_dtype=}, {fallback=}, {missing_ok=}"
    )

    def check(contents: CheckpointMetadata) -> None:
        check_fits(contents, model, optimizer, strict=strict, convert_dtype=convert_dtype)

    loaded = load_newest(directory, comm, layout_resolver(model), check, fallback=fallback)
    if loaded is None and missing_ok:
        return None
    if loaded is None:
        with watchdog.waiting(lambda: "looking for a checkpoint"):
            reason = comm.bcast(describe_missing(directory) if comm.rank == 0 else "")
        raise CheckpointError(f"{reason}. To start without a checkpoint, pass missing_ok=True.")
    missing, unexpected = restore_state(loaded, model, optimizer, comm, strict=strict, convert_dtype=convert_dtype)
    return Loaded(loaded.step, loaded.values.get(_USER, {}), missing, unexpected, loaded.skipped)


def layout_resolver(model: torch.nn.Module) -> LayoutResolver:
    """Return how to read a checkpoint for ``model``: sharded parameters, and their optimizer state, as blocks."""
    # With all names of tied parameters: a checkpoint has an entry for each of them.
    named = model.named_parameters(remove_duplicate=False)
    sharded = {name: p for name, p in named if isinstance(p, DistTensor)}

    def layout_of(name: str, shape: Sequence[int]) -> Distribution | None:
        kind, _, rest = name.partition("/")
        parameter = sharded.get(rest if f"{kind}/" in (_MODEL, _AVERAGE) else rest.rpartition("/")[0])
        return parameter.dist if parameter is not None and parameter.shape == tuple(shape) else None

    return layout_of


def capture_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, comm: MPI.Intracomm
) -> tuple[Tensors, dict[str, Any]]:
    """Return the state of model, optimizer and random number generators.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    model : Module
        The model.
    optimizer : Optimizer or None
        The optimizer.
    comm : MPI.Intracomm
        The ranks.

    Returns
    -------
    dict of str to Tensor
        Tensors, under ``model/``, ``optimizer/`` and ``random/``. Sharded ones are DistTensors.
    dict of str to object
        Plain values, for JSON.
    """
    state, extra = _model_state(model)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in state.items()}
    moments, values = optimizer_state(model, optimizer)
    if extra:
        values[EXTRA] = extra
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    # One rank's copy is written, so a difference would be lost. Ranks may have random-number states of their own.
    with watchdog.waiting(lambda: "names of a checkpoint's tensors"):
        written = set(comm.bcast(list(tensors)))
    try_on_all_ranks(comm, lambda: _check_names(tensors, written, comm.rank), MismatchError)
    check_tensors(tensors, comm, "save_checkpoint")
    for name, own in _random_states(model).items():
        with watchdog.waiting(lambda: "random numbers of all ranks"):
            states = comm.gather(own.numpy(), root=0) or []
        tensors[f"random/{name}"] = torch.from_numpy(np.array(states, dtype=np.uint8))
    return tensors, values


def _check_names(tensors: Tensors, written: set[str], rank: int) -> None:
    """Raise MismatchError if a tensor of this rank is missing on rank 0, whose copies are written.

    Rank 0 may have more: that of a pipeline has the optimizer state of all stages.
    """
    missing = [name for name in tensors if name not in written]
    if missing:
        raise MismatchError(
            f"save_checkpoint: rank 0, whose copies are written, lacks {len(missing)} tensors of rank {rank}, the "
            f"first {missing[0]!r}. Pass the same model on all ranks, and an optimizer with the same parameters."
        )


def _model_state(model: torch.nn.Module) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a model's state dict, and its other entries (``get_extra_state``). Collective."""
    # keep_vars: sharded parameters remain blocks. Otherwise state_dict() would gather each of them.
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def restore_state(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    comm: MPI.Intracomm,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Restore the state of model, optimizer and random number generators, bit for bit.

    If the number of ranks has changed, every rank takes rank 0's random number states. Collective: call on every rank.

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint.
    model, optimizer, comm, strict, convert_dtype
        As in :func:`load_checkpoint`.

    Returns
    -------
    tuple of str
        Names that the checkpoint lacks; only without ``strict``.
    tuple of str
        Names that neither model nor optimizer has; only without ``strict``.

    Raises
    ------
    CheckpointError
        If it is of another model or optimizer. Nothing has been changed then.
    """
    check_fits(checkpoint, model, optimizer, strict=strict, convert_dtype=convert_dtype)
    saved, (wanted, extra) = select_prefix("model/", checkpoint.tensors), _model_state(model)
    saved_extra = checkpoint.values.get(EXTRA, {})
    what = f"checkpoint of step {checkpoint.step}"

    # Before anything is changed: if a tensor cannot be converted on one rank, no rank has a part of the new state.
    def converted() -> tuple[Tensors, Tensors]:
        converted_state = {name: as_dtype(saved[name], wanted[name], name, what) for name in wanted if name in saved}
        return converted_state, _saved_random_states(checkpoint, model, comm)

    converted_state, random = try_on_all_ranks(comm, converted, CheckpointError)
    converted_state |= {name: value for name, value in saved_extra.items() if name in extra}
    model.load_state_dict(converted_state, strict=strict)
    unused = list(select_prefix("optimizer/", checkpoint.tensors))
    if optimizer is not None and not describe_optimizer_mismatch(checkpoint.values, optimizer):
        unused = restore_optimizer(checkpoint, model, optimizer, convert_dtype=convert_dtype)
    for name, state in random.items():
        _set_random_state(model, name, state)
    had, has = {**saved, **saved_extra}, {**wanted, **extra}
    unexpected = [f"model/{name}" for name in had if name not in has] + [f"optimizer/{name}" for name in unused]
    return tuple(f"model/{name}" for name in has if name not in had), tuple(unexpected)


def capture_average(average: torch.optim.swa_utils.AveragedModel) -> Tensors:
    """Return the tensors of a moving average, to be saved with those of :func:`capture_state`.

    Collective: call on every rank.

    Parameters
    ----------
    average : AveragedModel
        The moving average.

    Returns
    -------
    dict of str to Tensor
        Tensors under ``average/``.
    """
    return {f"{_AVERAGE}{name}": tensor.detach() for name, tensor in _model_state(average.module)[0].items()}


def restore_average(checkpoint: Checkpoint, average: torch.optim.swa_utils.AveragedModel) -> None:
    """Restore a moving average of the weights, bit for bit. Its number of averaged models becomes the step.

    Parameters
    ----------
    checkpoint : Checkpoint
        A checkpoint with the tensors of :func:`capture_average`.
    average : AveragedModel
        The moving average. Extra states of its modules are not restored.

    Raises
    ------
    CheckpointError
        If the checkpoint has no average of this model. Nothing has been changed then.
    """
    saved, what = select_prefix(_AVERAGE, checkpoint.tensors), f"the average in checkpoint of step {checkpoint.step}"
    wanted, extra = _model_state(average.module)
    check_tensors_fit(saved, wanted, what)
    average.module.load_state_dict({**saved, **extra})  # extra states are not averaged, so they are unchanged
    average.n_averaged.fill_(checkpoint.step)


def with_average(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the moving average in place of the weights, if it has one."""
    saved = select_prefix(_AVERAGE, checkpoint.tensors)
    weights = {f"{_MODEL}{name}": tensor for name, tensor in saved.items()}
    return replace(checkpoint, tensors=checkpoint.tensors | weights)


def check_fits(
    contents: CheckpointMetadata | Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> None:
    """Check that a checkpoint is of this model and optimizer, by the metadata of its tensors.

    Parameters
    ----------
    contents : CheckpointMetadata or Checkpoint
        The checkpoint.
    model, optimizer, strict, convert_dtype
        As in :func:`load_checkpoint`.

    Raises
    ------
    CheckpointError
        If it is not; the error lists all differences.
    """
    what = f"checkpoint of step {contents.step}"
    wanted, extra = _model_state(model)
    check_tensors_fit(
        select_prefix("model/", contents.tensors), wanted, what, strict=strict, convert_dtype=convert_dtype
    )
    other_extra = sorted(contents.values.get(EXTRA, {}).keys() ^ extra.keys())
    if other_extra and strict:
        raise CheckpointError(
            f"{what} does not fit: either the checkpoint or the model lacks {', '.join(map(repr, other_extra))}, which "
            "get_extra_state returns. Load it with strict=False, or into the same model."
        )
    if optimizer is None:
        return
    other = describe_optimizer_mismatch(contents.values, optimizer)
    if other and strict:
        raise CheckpointError(f"{what} {other}")
    if not other:
        check_optimizer_state(contents, model, optimizer, what)


def as_dtype(saved: torch.Tensor, wanted: torch.Tensor, name: str, what: str) -> torch.Tensor:
    """Return ``saved`` with the dtype and the device of ``wanted``.

    Parameters
    ----------
    saved, wanted : Tensor
        The saved tensor, and the model's.
    name, what : str
        Names of the tensor and of the checkpoint, for the error.

    Returns
    -------
    Tensor
        The converted values.

    Raises
    ------
    CheckpointError
        If values are too large for the dtype.
    """
    values = saved.to(wanted.device, wanted.dtype)
    # The blocks, so that the comparison needs no messages.
    if values.dtype != saved.dtype:
        before, after = (x.local if isinstance(x, DistTensor) else x for x in (saved, values))
        if (torch.isfinite(before).to(after.device) & ~torch.isfinite(after)).any():
            raise CheckpointError(f"{what}: {name!r} has values of {saved.dtype} that {values.dtype} cannot hold")
    return values


def _saved_random_states(checkpoint: Checkpoint, model: torch.nn.Module, comm: MPI.Intracomm) -> Tensors:
    """Return the saved state of each of this rank's generators that the checkpoint has."""
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
        # On another number of ranks there is no state for each of them: all continue that of rank 0.
        states[name] = saved[comm.rank if len(saved) == comm.size else 0].clone()
        if name == "torch":
            torch.Generator().set_state(states[name])  # raises for an invalid state, before anything is changed
    return states


def _random_states(model: torch.nn.Module) -> Tensors:
    """Return the state of each generator that this rank uses: the CPU's, and that of the model's GPU."""
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
