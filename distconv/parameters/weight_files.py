"""Weight files of PyTorch and safetensors, and distributed checkpoints. No code in them is run."""

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


_EXTRA_STATE_SUFFIX = "_extra_state"
"""Suffix of the names in a state dict of results of ``get_extra_state``, which need not be tensors."""


def read_weights(path: Path, comm: MPI.Intracomm) -> Mapping[str, torch.Tensor]:
    """Read weights on every rank.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    path : Path
        A file of ``torch.save(model.state_dict())`` or of safetensors, or a folder of ``torch.distributed.checkpoint``.
        If the saved dictionary has the key ``"state_dict"``, only this entry is read.
    comm : MPI.Intracomm
        Communicator of all ranks that call.

    Returns
    -------
    mapping of str to Tensor
        Full tensors on the CPU, by name, and the extra states of modules, which may be other objects.

    Raises
    ------
    CheckpointError
        On every rank, if the file has another format, contains other objects, or cannot be read.
    MismatchError
        On every rank, if ranks read different weights.
    """
    weights = try_on_all_ranks(comm, lambda: _read(path), CheckpointError)
    # Each rank has read the file itself. On a network file system one of them may have seen an older one.
    tensors = {name: x for name, x in weights.items() if isinstance(x, torch.Tensor)}
    described = [f"{name} {tuple(x.shape)} {x.dtype} with checksum {checksum(x):x}" for name, x in tensors.items()]
    others = [name for name in weights if name not in tensors]
    check_same_on_all_ranks(comm, f"weights in {path}", ", ".join([*described, *others]))
    return weights


def write_weights(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write weights in the format that the suffix of the path selects.

    Not collective: call on one rank.

    Parameters
    ----------
    state : mapping of str to Tensor
        Full tensors by name.
    path : Path
        ``NAME.safetensors``; a name without a suffix for a folder of ``torch.distributed.checkpoint``; any other suffix
        for a file of ``torch.save``.

    Raises
    ------
    CheckpointError
        If the folder exists, safetensors is not installed, or the format does not support an entry that is not a
        tensor.
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
        # safetensors rejects tensors with gaps in their memory.
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
    """Load weights from a file into a model.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    model : torch.nn.Module
        Model that gets the weights, the same on all ranks.
    path : Path
        As in :func:`read_weights`.
    comm : MPI.Intracomm
        Communicator of all ranks that call.
    of : str
        The name of the model in errors.
    unfit : type
        The class of the error if the weights do not fit the model.

    Raises
    ------
    CheckpointError
        On every rank, if the weights cannot be read.
    unfit
        On every rank, if they do not fit the model.
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
    """Return the prefix with which all ``wanted`` names are in ``saved``, or "" if there is no such prefix.

    Parameters
    ----------
    saved : collection of str
        Names of weights in the file.
    wanted : collection of str
        Names of weights of the model.

    Returns
    -------
    str

    Examples
    --------
    >>> added_prefix(["module.a.bias", "module.a.weight"], ["a.weight", "a.bias"])
    'module.'
    """
    first = next(iter(wanted), None)
    if first is None:
        return ""
    # Sorted, so that the message does not depend on the order of names in the file.
    prefixes = sorted(name.removesuffix(first) for name in saved if name.endswith(f".{first}"))
    return next((prefix for prefix in prefixes if all(prefix + name in saved for name in wanted)), "")


def without_prefix(prefix: str) -> str:
    """Return the suggested fix for weights whose names have an added ``prefix``.

    Parameters
    ----------
    prefix : str
        Prefix that the names in the file have and those of the model have not.

    Returns
    -------
    str
    """
    return (
        f"their names begin with {prefix!r}, as in DataParallel, torch.compile or Lightning, and the model's do not. "
        f"Save them under the model's names: {{name.removeprefix({prefix!r}): x for name, x in state.items()}}, or the "
        "state dict of the module inside."
    )


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if path.is_dir():
        from distconv.parameters import distributed_checkpoint  # its imports take long

        return distributed_checkpoint.read(path)
    with open_regular(path) as file:
        if path.suffix == SAFETENSORS:
            return _read_safetensors(path)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            reason = " ".join(f"{error}".split())[:200]
            raise CheckpointError(
                f"{path} holds no weights that can be read without running code: {reason}. "
                f"{_suggest_extraction(path, 'network_weights')} That key is nnU-Net's; others are 'state_dict' and "
                "'model'."
            ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not _is_weights(content):
        inside = [key for key, value in content.items() if _is_weights(value)] if isinstance(content, dict) else []
        raise CheckpointError(
            f"{path} holds {type(content).__name__}; it must be a state_dict: tensors by name"
            + (f". Its {', '.join(map(repr, inside))} is one. {_suggest_extraction(path, inside[0])}" if inside else "")
        )
    return content  # type: ignore[no-any-return]


def _is_weights(content: object) -> bool:
    return isinstance(content, dict) and all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or name.endswith(_EXTRA_STATE_SUFFIX))
        for name, value in content.items()
    )


def _suggest_extraction(path: Path, key: str) -> str:
    return (
        "If you trust the file, write its weights alone: "
        f"torch.save(torch.load({path.name!r}, weights_only=False)[{key!r}], 'weights.pt')."
    )


def _read_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
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
