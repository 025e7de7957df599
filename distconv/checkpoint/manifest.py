"""Manifests: what a checkpoint consists of, that it was finished, and behind which others.

Each manifest has a serial number, one more than the highest there was when it was committed. Clocks may go back, and so
may steps, when a run starts anew. Where a manifest is damaged its number is not known: those that come later list it by
its checksum, and any other counts as the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
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
MOST_BYTES = 1 << 28
"""Far more than any has."""
WAY_OUT = "delete it to resume earlier, or ask for that (--resume whole, fallback=True)"
"""Of who has a damaged checkpoint."""

_STEP = re.compile(r"step-(\d{6,})")


def folder_of(directory: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return Path(directory) / f"step-{step:06d}"


def newest(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Path | None:
    """The finished checkpoint below ``directory`` that was committed last, as rank 0 sees it, or None. Collective."""
    return next(iter(newest_first(directory, comm)), None)


def newest_first(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> list[Path]:
    """All of them, as rank 0 sees them. Collective."""

    def look() -> list[Path]:
        return [each.folder for each in reversed(commits(Path(directory)))]

    return try_on_rank_0(comm, look, CheckpointError)


@dataclass(frozen=True)
class Commit:
    """A finished checkpoint."""

    folder: Path
    step: int
    digest: str
    """The checksum of all of its manifest."""
    serial: int | None = None
    """When it was committed; None if its manifest is damaged."""
    damaged: tuple[str, ...] = ()
    """Checksums of damaged manifests that were there before."""


def commits(directory: Path) -> list[Commit]:
    """The finished checkpoints below ``directory``, in the order in which they were committed."""
    every = [_commit(int(match[1]), folder) for match, folder in _steps(directory)]
    # Those from before there were serial numbers came in the order of their steps.
    whole = sorted((each for each in every if each.serial is not None), key=lambda each: (each.serial, each.step))
    earlier = {digest for each in whole for digest in each.damaged}
    damaged = sorted((each for each in every if each.serial is None), key=lambda each: each.step)
    return [
        *(each for each in damaged if each.digest in earlier),
        *whole,
        *(each for each in damaged if each.digest not in earlier),
    ]


def _steps(directory: Path) -> Iterator[tuple[re.Match[str], Path]]:
    """Folders with a commit mark. Links are none: what they lead to is not ours to delete, nor to write to."""
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _STEP.fullmatch(folder.name)
        if match and not folder.is_symlink() and os.path.lexists(folder / MANIFEST):
            yield match, folder


def _commit(step: int, folder: Path) -> Commit:
    try:
        content = _content(folder)
    except CheckpointError:
        return Commit(folder, step, "")
    digest = hashlib.sha256(content).hexdigest()
    try:
        manifest = _verified(folder, content, schema.check_head)
    except CheckpointError:
        return Commit(folder, step, digest)
    return Commit(folder, step, digest, manifest.get("serial", 0), tuple(manifest.get("damaged", ())))


def nothing_in(directory: str | os.PathLike[str]) -> str:
    """That there is no finished checkpoint below ``directory``, and what is there in its place."""
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


def behind(earlier: list[Commit]) -> dict[str, Any]:
    """What a manifest says that is committed behind ``earlier`` ones."""
    serial = 1 + max((each.serial for each in earlier if each.serial is not None), default=0)
    damaged = sorted({each.digest for each in earlier if each.serial is None and each.digest})
    return {"serial": serial, **({"damaged": damaged} if damaged else {})}


def text_of(manifest: Mapping[str, Any]) -> bytes:
    """``manifest`` with its checksum, as it is written."""
    return json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1, allow_nan=False).encode()


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, verified: all in it is as we write it.

    Raises
    ------
    CheckpointError
        If it is missing, damaged, of a newer format or of another step.
    """
    return _verified(folder, _content(folder), schema.check)


def _content(folder: Path) -> bytes:
    try:
        with open_regular(folder / MANIFEST, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise OSError(f"{MANIFEST} has {size} bytes, more than any")
            return file.read(size)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {folder} is incomplete: it has no {MANIFEST}, so it was never finished"
        ) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}; {WAY_OUT}") from error


def _verified(folder: Path, content: bytes, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """What the manifest says, as far as ``check`` looks at it.

    Raises
    ------
    CheckpointError
        If it is none.
    """
    try:
        manifest = parse_json(content.decode(), MANIFEST, CheckpointError, _no_number)
        said = manifest.pop("sha256") if isinstance(manifest, dict) else None
        right = said is not None and said == _digest(manifest)
    except (ValueError, KeyError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}; {WAY_OUT}") from error
    kind = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(kind, int) and kind > FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {kind}, this version reads up to {FORMAT}")
    if not right:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} has another checksum; {WAY_OUT}")
    try:
        if kind != FORMAT or isinstance(kind, bool):
            raise CheckpointError(f"it has no format that was ever written, but {kind!r}")
        check(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}; {WAY_OUT}") from error
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        raise CheckpointError(f"checkpoint {folder} holds step {manifest['step']}: its files come from elsewhere")
    return dict(manifest)


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
