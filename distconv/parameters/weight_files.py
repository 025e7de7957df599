"""Weights as others have them: torch's and safetensors files, and distributed checkpoints. Nothing in them is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.communication.digest import checksum
from distconv.errors import CheckpointError, DistconvError
from distconv.whole_files import open_regular, write_file

SAFETENSORS = ".safetensors"


_EXTRA = "_extra_state"
"""How names end of what a module's ``get_extra_state`` returned, which need not be a tensor."""


def read_weights(path: Path, comm: MPI.Intracomm) -> Mapping[str, torch.Tensor]:
    """The tensors of a file by name: of ``torch.save(model.state_dict())``, or of safetensors. Collective.

    A folder is one of ``torch.distributed.checkpoint``.

    Raises
    ------
    CheckpointError
        On all ranks, if it is neither, holds other things than tensors, or cannot be read.
    MismatchError
        If ranks see different files.
    """
    weights = try_on_all_ranks(comm, lambda: _read(path), CheckpointError)
    check_same_on_all_ranks(
        comm, f"weights in {path}", ", ".join(f"{name} {_described(x)}" for name, x in weights.items())
    )
    return weights


def write_weights(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by name as the path says: .safetensors, a folder (a name without an ending), or else torch's.

    A folder is one of ``torch.distributed.checkpoint``. On one rank.

    Raises
    ------
    CheckpointError
        If there is such a folder already, safetensors is not installed, or what is not a tensor has no place there.
    """
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others and (not path.suffix or path.suffix == SAFETENSORS):
        raise CheckpointError(
            f"{path}: {', '.join(map(repr, others))}, which get_extra_state returned, is not a tensor. Write a .pt "
            "file."
        )
    if not path.suffix:
        from distconv.parameters import distributed_checkpoint  # its imports take long

        distributed_checkpoint.write(state, path)
    elif path.suffix == SAFETENSORS:
        try:
            from safetensors.torch import save
        except ImportError as error:
            raise CheckpointError(f"{path}: safetensors is not installed: pip install safetensors") from error
        write_file(path, save({name: tensor.contiguous() for name, tensor in state.items()}))
    else:
        image = io.BytesIO()
        torch.save(dict(state), image)
        write_file(path, image.getbuffer())


def load_weights(
    model: torch.nn.Module,
    path: Path,
    comm: MPI.Intracomm,
    *,
    of: str = "the model",
    unfit: type[DistconvError] = CheckpointError,
) -> None:
    """Let ``model``, which an error calls ``of``, have the weights of a file. Collective.

    Raises
    ------
    CheckpointError
        On all ranks, if it cannot be read; if its weights do not fit it is an ``unfit``.
    """
    state = read_weights(path, comm)

    def load() -> None:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(f"{error}".split())
            if prefix := added_prefix(state, model.state_dict()):
                reason = without_prefix(prefix)
            raise unfit(f"{path}: the weights do not fit {of}: {reason}") from error

    try_on_all_ranks(comm, load, unfit)


def added_prefix(saved: Collection[str], wanted: Collection[str]) -> str:
    """Return what all ``wanted`` names have before them in ``saved``; empty if that is nothing, or not all are there.

    >>> added_prefix(["module.a.bias", "module.a.weight"], ["a.weight", "a.bias"])
    'module.'
    """
    first = next(iter(wanted), None)
    if first is None:
        return ""
    prefixes = sorted(name.removesuffix(first) for name in saved if name.endswith(f".{first}"))
    return next((prefix for prefix in prefixes if all(prefix + name in saved for name in wanted)), "")


def without_prefix(prefix: str) -> str:
    """Return what to do about weights whose names have an added ``prefix``."""
    return (
        f"their names begin with {prefix!r}, as in DataParallel, torch.compile or Lightning, and the model's do not. "
        f"Save them under the model's names: {{name.removeprefix({prefix!r}): x for name, x in state.items()}}, or the "
        "state dict of the module inside."
    )


def _described(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype} with checksum {checksum(x):x}" if isinstance(x, torch.Tensor) else ""


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if path.is_dir():
        from distconv.parameters import distributed_checkpoint  # its imports take long

        return distributed_checkpoint.read(path)
    with open_regular(path) as file:
        if path.suffix == SAFETENSORS:
            return _of_safetensors(path)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            reason = " ".join(f"{error}".split())[:200]
            raise CheckpointError(
                f"{path} holds no weights that can be read without running code: {reason}. "
                f"{_alone(path, 'network_weights')} That key is nnU-Net's; others are 'state_dict' and 'model'."
            ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not _is_weights(content):
        inside = [key for key, value in content.items() if _is_weights(value)] if isinstance(content, dict) else []
        raise CheckpointError(
            f"{path} holds {type(content).__name__}; it must be a state_dict: tensors by name"
            + (f". Its {', '.join(map(repr, inside))} is one. {_alone(path, inside[0])}" if inside else "")
        )
    return content  # type: ignore[no-any-return]


def _is_weights(content: object) -> bool:
    return isinstance(content, dict) and all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or name.endswith(_EXTRA))
        for name, value in content.items()
    )


def _alone(path: Path, key: str) -> str:
    return (
        "If you trust the file, write its weights alone: "
        f"torch.save(torch.load({path.name!r}, weights_only=False)[{key!r}], 'weights.pt')."
    )


def _of_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{path}: safetensors is not installed: pip install safetensors") from error
    try:
        weights: Mapping[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    return weights
