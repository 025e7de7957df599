"""Reading of checkpoints: every byte is verified, and every tensor must be whole."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint import manifest
from distconv.communication.agreement import agree, together
from distconv.errors import CheckpointError

_STATE = re.compile(r"state-[0-9a-f]{12}\.h5")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and values that JSON can carry."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def load(folder: str | os.PathLike[str], comm: MPI.Intracomm) -> Checkpoint:
    """Read and verify the checkpoint in ``folder`` (one step's). Every rank reads it. Collective.

    Raises
    ------
    CheckpointError
        On all ranks, if on any it is incomplete, damaged or of a newer format.
    """
    agree(comm, "checkpoint to load", str(folder))
    return together(comm, lambda: _read(Path(folder)), CheckpointError)


def compare(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise CheckpointError, listing every difference in names, shapes and dtypes, unless there is none.

    Raises
    ------
    CheckpointError
        If there is any.
    """
    wrong = [f"{name!r} is missing" for name in wanted if name not in found]
    wrong += [f"{name!r} is not in the model" for name in found if name not in wanted]
    for name in wanted:
        if name in found and (found[name].shape, found[name].dtype) != (wanted[name].shape, wanted[name].dtype):
            have, want = found[name], wanted[name]
            wrong.append(f"{name!r} is {have.dtype} {tuple(have.shape)}, not {want.dtype} {tuple(want.shape)}")
    if wrong:
        raise CheckpointError(f"{what} does not fit, {len(wrong)} differences: {'; '.join(wrong)}")


def _read(folder: Path) -> Checkpoint:
    found = manifest.read(folder)
    images = {name: _verified(folder, name, entry) for name, entry in found["files"].items()}
    tensors: dict[str, torch.Tensor] = {}
    opened = {name: h5py.File(io.BytesIO(image), "r") for name, image in images.items()}
    try:
        for name, entry in found["tensors"].items():
            tensors[name] = _tensor(folder, name, entry, opened)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    finally:
        for file in opened.values():
            file.close()
    return Checkpoint(found["step"], tensors, found["values"])


def _verified(folder: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    if not _STATE.fullmatch(name):
        raise CheckpointError(f"checkpoint {folder} is damaged: it refers to the file {name!r}")
    try:
        image = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {error}") from error
    if len(image) != entry["bytes"]:
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} has {len(image)} bytes, not {entry['bytes']}")
    if hashlib.sha256(image).hexdigest() != entry["sha256"]:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: the checksum of {name} is wrong; delete it to resume earlier"
        )
    return image


def _tensor(folder: Path, name: str, entry: Mapping[str, Any], opened: Mapping[str, h5py.File]) -> torch.Tensor:
    """One tensor put together from its pieces, which must cover it exactly once."""
    dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    tensor = torch.empty(entry["shape"], dtype=dtype, device="cpu")
    covered = torch.zeros(entry["shape"], dtype=torch.uint8, device="cpu")
    for piece in entry["pieces"]:
        values = torch.from_numpy(np.asarray(opened[piece["file"]][name][()]))
        box = tuple(slice(start, stop) for start, stop in piece["box"])
        if tensor[box].shape != values.shape:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: a piece of {name!r} has shape {tuple(values.shape)}"
            )
        tensor[box] = values.view(torch.bfloat16) if dtype is torch.bfloat16 else values
        covered[box] += 1
    if not bool((covered == 1).all()):
        raise CheckpointError(
            f"checkpoint {folder}: the pieces of {name!r} cover {int((covered > 0).sum())} of {tensor.numel()} "
            f"elements, {int((covered > 1).sum())} of them more than once"
        )
    return tensor
