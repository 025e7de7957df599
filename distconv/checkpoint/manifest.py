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
WAY_OUT = "delete it to resume earlier, or ask for that (--resume whole, fallback=True)"
"""Of who has a damaged checkpoint."""

_STEP = re.compile(r"step-(\d{6,})")


def folder_of(directory: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return Path(directory) / f"step-{step:06d}"


def newest(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Path | None:
    """The finished checkpoint of the highest step below ``directory``, as rank 0 sees it, or None. Collective."""
    return next(iter(newest_first(directory, comm)), None)


def newest_first(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> list[Path]:
    """All of them, as rank 0 sees them. Collective."""

    def look() -> list[Path]:
        steps = finished(Path(directory)) if comm.rank == 0 else {}
        return [steps[step] for step in sorted(steps, reverse=True)]

    found: list[Path] = comm.bcast(together(comm, look, CheckpointError), root=0)
    return found


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
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error!r}; {WAY_OUT}") from error
    if manifest.get("format", 0) > FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {manifest['format']}, this version reads up to {FORMAT}")
    if said != _digest(manifest):
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} has another checksum; {WAY_OUT}")
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(f"checkpoint {folder} holds step {manifest['step']}: its files come from elsewhere")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
