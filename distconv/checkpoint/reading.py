"""Reading of checkpoints: every rank what it needs, every file verified, and every tensor whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import torch
from mpi4py import MPI

from distconv.checkpoint import manifest
from distconv.checkpoint.files import digest_of
from distconv.checkpoint.pieces import box_of, copy_piece, is_needed, whole
from distconv.checkpoint.schema import dtype_of
from distconv.checkpoint.values import PREFIX, filled, from_json
from distconv.checkpoint.verification import AT_ONCE, listed, note_whole, open_file
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.distribution import Box, Distribution
from distconv.errors import CheckpointError
from distconv.parameters.weight_files import added_prefix, without_prefix
from distconv.tensor import DistTensor

LAG_S = 30.0
"""How long a rank waits for files that rank 0 sees: file systems of several nodes lag."""

LayoutOf = Callable[[str, Sequence[int]], Distribution | None]
"""How a rank wants the tensor of this name and shape: under a layout, or whole."""


class Described(NamedTuple):
    """What a checkpoint says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: tensors by name, and plain values, which may have tensors among them."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """What is wrong with newer ones, in place of which this one was read."""


class Contents(NamedTuple):
    """What a checkpoint says of itself, before any tensor is read."""

    step: int
    tensors: dict[str, Described]
    values: dict[str, Any]


Check = Callable[[Contents], None]
"""Raises CheckpointError if a checkpoint is of something else. All ranks come to the same."""


def load(
    folder: str | os.PathLike[str],
    comm: MPI.Intracomm,
    layout_of: LayoutOf | None = None,
    check: Check | None = None,
) -> Checkpoint:
    """Read and verify the checkpoint in ``folder`` (one step's). Collective.

    A rank reads the files that hold something of its blocks. Tensors for which ``layout_of`` names a layout come as
    DistTensors on the CPU, the others whole. ``check`` refuses what fits nothing, before anything is made room for.

    Raises
    ------
    CheckpointError
        On all ranks, if on any it is incomplete, damaged or of a newer format.
    """
    check_same_on_all_ranks(comm, "checkpoint to load", str(folder))
    place = Path(folder)
    # Rank 0 says what belongs to it: others may see the folder as it was some time ago.
    newest = try_on_rank_0(comm, lambda: listed(place), CheckpointError)
    contents = Contents(
        newest["step"],
        {name: Described(dtype_of(entry), tuple(entry["shape"])) for name, entry in newest["tensors"].items()},
        from_json(newest["values"]),
    )
    if check is not None:
        try_on_all_ranks(comm, lambda: check(contents), _UnfitCheckpointError)
    read = try_on_all_ranks(comm, lambda: _Reading(place, newest, comm, layout_of).read(contents), CheckpointError)
    if comm.rank == 0:
        note_whole(place)
    return read


def load_newest(
    directory: str | os.PathLike[str],
    comm: MPI.Intracomm,
    layout_of: LayoutOf | None = None,
    check: Check | None = None,
    *,
    fallback: bool = False,
) -> Checkpoint | None:
    """:func:`load` of the checkpoint below ``directory`` that was committed last, or None if there is none. Collective.

    With ``fallback`` those that are damaged are passed over.

    Raises
    ------
    CheckpointError
        On all ranks, if it is damaged; with ``fallback`` if all are.
    """
    skipped: list[str] = []
    for folder in manifest.newest_first(directory, comm):
        try:
            return replace(load(folder, comm, layout_of, check), skipped=tuple(skipped))
        except _UnfitCheckpointError:
            raise
        except CheckpointError as error:
            if not fallback:
                raise
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(f"no checkpoint in {directory} is whole: {'; '.join(skipped)}")
    return None


class _UnfitCheckpointError(CheckpointError):
    """A checkpoint that may be whole, but fits nothing here: none to be passed over."""


def compare(
    saved: Mapping[str, torch.Tensor | Described],
    wanted: Mapping[str, torch.Tensor],
    what: str,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> None:
    """Raise CheckpointError, listing every difference in names, shapes and dtypes, unless there is none.

    ``strict=False`` lets names differ, ``convert_dtype=True`` dtypes of the same kind.

    Raises
    ------
    CheckpointError
        If there is any.
    """
    wrong = [f"{name!r} is missing" for name in wanted if strict and name not in saved]
    wrong += [f"{name!r} is not in the model" for name in saved if strict and name not in wanted]
    for name in (name for name in wanted if name in saved):
        have, want = saved[name], wanted[name]
        fits = torch.can_cast(have.dtype, want.dtype) if convert_dtype else have.dtype == want.dtype
        if tuple(have.shape) != tuple(want.shape) or not fits:
            wrong.append(
                f"{name!r} is {have.dtype} {tuple(have.shape)} in the checkpoint, {want.dtype} {tuple(want.shape)} "
                "in the model"
            )
    if wrong and (prefix := added_prefix(saved, wanted)):
        raise CheckpointError(f"{what} does not fit: {without_prefix(prefix)}")
    if wrong:
        raise CheckpointError(f"{what} does not fit, {len(wrong)} differences: {'; '.join(wrong)}")


class _Reading:
    """This rank's part of reading a checkpoint that rank 0 has found."""

    def __init__(
        self, folder: Path, listing: Mapping[str, Any], comm: MPI.Intracomm, layout_of: LayoutOf | None
    ) -> None:
        self._folder, self._found, self._comm = folder, listing, comm
        self._until = time.monotonic() + LAG_S
        shapes = {name: entry["shape"] for name, entry in listing["tensors"].items()}
        layouts = {name: layout_of(name, shape) if layout_of else None for name, shape in shapes.items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self._boxes: dict[str, Box] = {name: whole(shape) for name, shape in shapes.items()}
        self._boxes |= {name: layout.box(None, shapes[name]) for name, layout in self._layouts.items()}

    def read(self, contents: Contents) -> Checkpoint:
        blocks = {
            name: torch.empty([i.extent for i in self._boxes[name]], dtype=dtype_of(entry), device="cpu")
            for name, entry in self._found["tensors"].items()
        }
        # The blocks of all ranks cover each tensor: every file is read, and verified, by some rank.
        for name in self._found["files"]:
            needed = [
                (tensor, box)
                for tensor, entry in self._found["tensors"].items()
                for piece in entry["pieces"]
                if piece["file"] == name and is_needed(box := box_of(piece), self._boxes[tensor])
            ]
            if needed:
                self._read_file(name, needed, blocks)
        tensors = {
            name: DistTensor(block, self._layouts[name], self._found["tensors"][name]["shape"])
            if name in self._layouts
            else block
            for name, block in blocks.items()
        }
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        return Checkpoint(contents.step, own, filled(contents.values, tensors))

    def _read_file(self, name: str, needed: Sequence[tuple[str, Box]], blocks: Mapping[str, torch.Tensor]) -> None:
        with self._verified(name) as image:
            try:
                with h5py.File(image, "r") as file:
                    for tensor, box in needed:
                        copy_piece(file, tensor, box, blocks[tensor], self._boxes[tensor])
            except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
                raise CheckpointError(f"checkpoint {self._folder} is damaged: {error}") from error

    def _verified(self, name: str) -> BinaryIO:
        """Return the file, open, whose content was compared with its checksum."""
        path, entry = self._folder / name, self._found["files"][name]
        while True:
            try:
                file = open_file(path, entry["bytes"])
                break
            except CheckpointError:
                if self._comm.rank == 0 or time.monotonic() > self._until:
                    raise
                time.sleep(0.1)
        # Not all of it at once: a rank may need little of a large file.
        if digest_of(_pieces(file, entry["bytes"])) != entry["sha256"]:
            file.close()
            raise CheckpointError(
                f"checkpoint {self._folder} is damaged: the checksum of {name} is wrong; {manifest.WAY_OUT}"
            )
        return file


def _pieces(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes and (piece := read_bytes(file, min(AT_ONCE, nbytes))):
        nbytes -= len(piece)
        yield piece


def read_bytes(file: BinaryIO, nbytes: int) -> bytes:
    """The next ``nbytes`` of a file."""
    return file.read(nbytes)
