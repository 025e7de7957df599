"""Checkpoints: named global tensors in HDF5 and everything else in JSON; no pickle, so reading one runs no code.

    directory/step-000123/state-<digest>.h5    the tensors, written as one memory image: image -> fsync -> rename
    directory/step-000123/manifest.json        names, checksums, position; written last: it is the commit mark

A step without a manifest was never finished and does not count. A new manifest replaces an old one in one rename, so
at no moment is a finished step lost. Every tensor is listed with the file and the global box of each of its pieces.
Tensors are whole (``capture`` gathers what is sharded): rank 0 writes one piece of each, which any grid reads.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import agree, together
from distconv.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")
_STATE = re.compile(r"state-[0-9a-f]{12}\.h5")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and values that JSON can carry."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def save(
    directory: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    comm: MPI.Intracomm,
    *,
    keep: int = 2,
) -> Path:
    """Write ``tensors`` (equal on all ranks) and ``values`` as this step's checkpoint. Collective.

    The newest ``keep`` are kept; older ones are deleted once this one is committed.

    Raises
    ------
    CheckpointError
        On all ranks, with the system's reason, if it could not be written; earlier checkpoints are intact.
    """
    agree(comm, "checkpoint", f"step {step} in {directory}")
    folder = Path(directory) / f"step-{step:06d}"

    def write() -> None:
        if comm.rank == 0:
            try:
                _write(folder, step, tensors, values)
                _delete_old(Path(directory), keep)
            except OSError as error:
                raise CheckpointError(f"checkpoint {folder} could not be written: {error}") from error

    together(comm, write, CheckpointError)
    return folder


def newest(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Path | None:
    """The finished checkpoint of the highest step below ``directory``, as rank 0 sees it, or None. Collective."""

    def look() -> str | None:
        steps = _finished(Path(directory)) if comm.rank == 0 else {}
        return str(steps[max(steps)]) if steps else None

    found = comm.bcast(together(comm, look, CheckpointError), root=0)
    return None if found is None else Path(found)


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


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    image = _image(tensors)
    digest = hashlib.sha256(image).hexdigest()
    name = f"state-{digest[:12]}.h5"
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": len(image), "sha256": digest}},
        "tensors": {key: _entry(tensor, name) for key, tensor in tensors.items()},
        "values": dict(values),
    }
    manifest["sha256"] = _digest(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(folder / name, image)
    _write_file(folder / MANIFEST, text)
    _sync_folder(folder.parent)
    for left in folder.iterdir():
        if left.name not in (name, MANIFEST):
            left.unlink()


def _entry(tensor: torch.Tensor, file: str) -> dict[str, Any]:
    box = [[0, extent] for extent in tensor.shape]
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "pieces": [{"file": file, "box": box}]}


def _image(tensors: Mapping[str, torch.Tensor]) -> bytes:
    # In memory: a disk that fills up while HDF5 writes to it ends the process with a segmentation fault.
    with h5py.File("state.h5", "w", driver="core", backing_store=False) as file:
        for name, tensor in tensors.items():
            file[name] = _array(tensor)
        file.flush()
        return bytes(file.id.get_file_image())


def _array(tensor: torch.Tensor) -> NDArray[np.generic]:
    host = tensor.detach().cpu().contiguous()
    # NumPy has no bfloat16: its bits go as integers.
    return host.view(torch.int16).numpy() if host.dtype is torch.bfloat16 else host.numpy()


def _write_file(path: Path, content: bytes) -> None:
    """Write beside ``path``, force it to the disk, then give it its name."""
    partial = path.with_name(f"{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_old(directory: Path, keep: int) -> None:
    steps = _finished(directory)
    for step in sorted(steps)[: max(0, len(steps) - max(keep, 1))]:
        # The mark goes first: half a checkpoint must not count as one.
        (steps[step] / MANIFEST).unlink()
        shutil.rmtree(steps[step])


def _finished(directory: Path) -> dict[int, Path]:
    """Folders with a commit mark by their step. Steps, not times, say which is newest: clocks may go back."""
    if not directory.is_dir():
        return {}
    found = ((_STEP.fullmatch(folder.name), folder) for folder in directory.iterdir())
    return {int(match[1]): folder for match, folder in found if match and (folder / MANIFEST).is_file()}


# -- reading ----------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> Checkpoint:
    manifest = _manifest(folder)
    images = {name: _verified(folder, name, entry) for name, entry in manifest["files"].items()}
    tensors: dict[str, torch.Tensor] = {}
    opened = {name: h5py.File(io.BytesIO(image), "r") for name, image in images.items()}
    try:
        for name, entry in manifest["tensors"].items():
            tensors[name] = _tensor(folder, name, entry, opened)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    finally:
        for file in opened.values():
            file.close()
    return Checkpoint(manifest["step"], tensors, manifest["values"])


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder} is incomplete: it has no {MANIFEST}, so it was never finished")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        said = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST}: {error!r}; delete it to resume earlier"
        ) from error
    if manifest.get("format", 0) > FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {manifest['format']}, this version reads up to {FORMAT}")
    if said != _digest(manifest):
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} has another checksum; delete it to resume earlier"
        )
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(f"checkpoint {folder} holds step {manifest['step']}: its files come from elsewhere")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
    covered = 0
    for piece in entry["pieces"]:
        values = torch.from_numpy(np.asarray(opened[piece["file"]][name][()]))
        part = tensor[tuple(slice(start, stop) for start, stop in piece["box"])]
        if part.shape != values.shape:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: a piece of {name!r} has shape {tuple(values.shape)}"
            )
        part.copy_(values.view(torch.bfloat16) if dtype is torch.bfloat16 else values)
        covered += part.numel()
    if covered != tensor.numel():
        raise CheckpointError(
            f"checkpoint {folder}: the pieces of {name!r} cover {covered} of {tensor.numel()} elements"
        )
    return tensor
