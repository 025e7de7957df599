"""Manifests of checkpoints: files and tensors, the mark of a finished checkpoint, and the order of commits.

Each manifest has a serial number, one more than the highest at its commit. Clocks may go back, and so may steps if a
run starts again, so neither of them determines the newest checkpoint. The serial number of a damaged manifest is
unknown. Later manifests list the damaged one by its checksum; if no manifest lists it, it counts as the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from distconv.checkpoint import schema
from distconv.communication.agreement import try_on_rank_0
from distconv.errors import CheckpointError
from distconv.text_files import parse_json
from distconv.whole_files import open_regular

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 1 << 28
"""Upper bound on the bytes of a manifest."""
SUGGESTED_FIX = "delete it to resume from an earlier one, or pass fallback=True (jobs: --resume whole) to skip it"
"""Suggested fix for a damaged checkpoint; errors end with it."""

_STEP = re.compile(r"step-(\d{6,})")


def step_folder(directory: str | os.PathLike[str], step: int) -> Path:
    """Return the folder of the checkpoint of a step.

    Parameters
    ----------
    directory : str or path-like
        Folder of a run's checkpoints.
    step : int
        The step.

    Returns
    -------
    Path
        ``directory/step-000042`` for step 42; more digits for steps from 10^6 on.
    """
    return Path(directory) / f"step-{step:06d}"


def newest(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Path | None:
    """Return the finished checkpoint that was committed last, as rank 0 sees it.

    Collective: call on every rank.

    Parameters
    ----------
    directory : str or path-like
        Folder of a run's checkpoints.
    comm : MPI.Intracomm
        The ranks.

    Returns
    -------
    Path or None
        Folder of the checkpoint, or None if no checkpoint is finished.
    """
    return next(iter(newest_first(directory, comm)), None)


def newest_first(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> list[Path]:
    """Return the folders of all finished checkpoints, the last commit first, as rank 0 sees them.

    Collective: call on every rank.

    Parameters
    ----------
    directory, comm
        As in :func:`newest`.

    Returns
    -------
    list of Path
        The same on all ranks.

    Raises
    ------
    CheckpointError
        On all ranks, if rank 0 cannot list the folder.
    """

    def look() -> list[Path]:
        return [each.folder for each in reversed(commits(Path(directory)))]

    return try_on_rank_0(comm, look, CheckpointError)


@dataclass(frozen=True)
class Commit:
    """A finished checkpoint, perhaps with a damaged manifest."""

    folder: Path
    step: int
    digest: str
    """SHA-256 checksum of the manifest's bytes; "" if they cannot be read."""
    serial: int | None = None
    """Serial number; None if the manifest is damaged."""
    damaged: tuple[str, ...] = ()
    """Checksums of the damaged manifests that were there at the commit."""


def commits(directory: Path) -> list[Commit]:
    """Return the finished checkpoints below ``directory`` in the order of their commits, the newest last."""
    every = []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _STEP.fullmatch(folder.name)
        # Links are left out: what they lead to must not be deleted or written to.
        if match and not folder.is_symlink() and os.path.lexists(folder / MANIFEST):
            every.append(_read_commit(int(match[1]), folder))
    # Old manifests have no serial number, which counts as 0: their order is that of their steps.
    readable = sorted((each for each in every if each.serial is not None), key=lambda each: (each.serial, each.step))
    earlier = {digest for each in readable for digest in each.damaged}
    damaged = sorted((each for each in every if each.serial is None), key=lambda each: each.step)
    return [
        *(each for each in damaged if each.digest in earlier),
        *readable,
        *(each for each in damaged if each.digest not in earlier),
    ]


def _read_commit(step: int, folder: Path) -> Commit:
    try:
        content = _read_content(folder)
    except CheckpointError:
        return Commit(folder, step, "")
    digest = hashlib.sha256(content).hexdigest()
    try:
        manifest = _decode_verified(folder, content, schema.check_head)
    except CheckpointError:
        return Commit(folder, step, digest)
    return Commit(folder, step, digest, manifest.get("serial", 0), tuple(manifest.get("damaged", ())))


def describe_missing(directory: str | os.PathLike[str]) -> str:
    """Return a message that ``directory`` has no finished checkpoint, with what is there instead."""
    place = Path(directory)
    if place.is_file():
        return (
            f"there is no finished checkpoint in {place}: it is a file. Load weights of torch by "
            "model.load_state_dict(torch.load(path)) on all ranks"
        )
    if not place.is_dir():
        return f"there is no finished checkpoint in {place}: there is no such folder"
    steps = sorted(folder for folder in place.iterdir() if _STEP.fullmatch(folder.name))
    links = [folder.name for folder in steps if folder.is_symlink()]
    seen = f"{links[0]} is a link, and is not followed" if links else ""
    if not seen and steps:
        seen = f"{steps[-1].name} was never finished"
    if not seen and _STEP.fullmatch(place.name) and (place / MANIFEST).is_file():
        seen = f"it is one itself; name {place.parent}"
    return f"there is no finished checkpoint in {place}" + (f": {seen}" if seen else "")


def serial_fields(earlier: list[Commit]) -> dict[str, Any]:
    """Return the keys of a manifest that is committed after ``earlier``: its serial number, and damaged manifests."""
    serial = 1 + max((each.serial for each in earlier if each.serial is not None), default=0)
    damaged = sorted({each.digest for each in earlier if each.serial is None and each.digest})
    return {"serial": serial, **({"damaged": damaged} if damaged else {})}


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``manifest`` with its checksum."""
    return json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1, allow_nan=False).encode()


def read(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest of a checkpoint.

    Parameters
    ----------
    folder : Path
        Folder of the checkpoint.

    Returns
    -------
    dict
        The manifest, checked against the schema.

    Raises
    ------
    CheckpointError
        If it is missing, damaged, of a newer format or of another step.
    """
    return _decode_verified(folder, _read_content(folder), schema.check_manifest)


def _read_content(folder: Path) -> bytes:
    try:
        with open_regular(folder / MANIFEST, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise OSError(f"{MANIFEST} has {size} bytes, more than any")
            # At most the size that was checked, even if the file grows.
            return file.read(size)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {folder} is incomplete: it has no {MANIFEST}, so it was never finished"
        ) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}; {SUGGESTED_FIX}") from error


def _decode_verified(folder: Path, content: bytes, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Return the manifest in ``content`` if its checksum is right and ``check`` accepts it.

    Raises
    ------
    CheckpointError
        If it is damaged or of a newer format.
    """
    try:
        manifest = parse_json(content.decode(), MANIFEST, CheckpointError, _reject_constant)
        # The checksum covers all keys but itself.
        said = manifest.pop("sha256") if isinstance(manifest, dict) else None
        right = said is not None and said == _checksum(manifest)
    except (ValueError, KeyError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}; {SUGGESTED_FIX}") from error
    # Before the checksum, whose rule a later format may change.
    kind = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(kind, int) and kind > FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {kind}, this version reads up to {FORMAT}")
    if not right:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} has another checksum; {SUGGESTED_FIX}")
    try:
        # True == 1.
        if kind != FORMAT or isinstance(kind, bool):
            raise CheckpointError(f"its format {kind!r} does not exist")
        check(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}; {SUGGESTED_FIX}") from error
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(
            f"checkpoint {folder} holds step {manifest['step']}. Its files were copied from another checkpoint."
        )
    return dict(manifest)


def _reject_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number of JSON")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
