"""Manifests: what a checkpoint consists of, and that it was finished."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpi4py import MPI

from distconv.communication.agreement import together
from distconv.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")


def folder_of(directory: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return Path(directory) / f"step-{step:06d}"


def newest(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Path | None:
    """The finished checkpoint of the highest step below ``directory``, as rank 0 sees it, or None. Collective."""

    def look() -> str | None:
        steps = finished(Path(directory)) if comm.rank == 0 else {}
        return str(steps[max(steps)]) if steps else None

    found = comm.bcast(together(comm, look, CheckpointError), root=0)
    return None if found is None else Path(found)


def finished(directory: Path) -> dict[int, Path]:
    """Folders with a commit mark by their step. Steps, not times, say which is newest: clocks may go back."""
    if not directory.is_dir():
        return {}
    found = ((_STEP.fullmatch(folder.name), folder) for folder in directory.iterdir())
    return {int(match[1]): folder for match, folder in found if match and (folder / MANIFEST).is_file()}


def text_of(manifest: Mapping[str, Any]) -> bytes:
    """``manifest`` with its checksum, as it is written.

    Raises
    ------
    ValueError
        If it holds a number that JSON has no word for.
    """
    return json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1, allow_nan=False).encode()


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, verified.

    Raises
    ------
    CheckpointError
        If it is missing, damaged, of a newer format or of another step.
    """
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
