"""Reading of checkpoints: each rank reads the blocks that it needs, and verifies every file that it reads.

::

    rank 0:  read the manifest -> broadcast          the manifest lists the files of the checkpoint
    all:     check(metadata)                         reject another model before memory is allocated
    all:     for each file with a needed piece: checksum, then copy the intersections

Every file is verified by some rank, since the blocks of all ranks cover each tensor.
"""

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
from distconv.checkpoint.files import sha256_of
from distconv.checkpoint.pieces import copy_piece, full_box, is_needed, piece_box
from distconv.checkpoint.schema import tensor_dtype
from distconv.checkpoint.values import PREFIX, from_json, replace_tensor_names
from distconv.checkpoint.verification import CHUNK_BYTES, cache_verified, open_file, read_complete_manifest
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.distribution import Box, Distribution
from distconv.errors import CheckpointError
from distconv.parameters.weight_files import added_prefix, without_prefix
from distconv.tensor import DistTensor

LAG_S = 30.0
"""Seconds that a rank waits for files that rank 0 sees: file systems of several nodes lag behind each other."""

LayoutResolver = Callable[[str, Sequence[int]], Distribution | None]
"""Returns the distribution in which to read a tensor, by name and shape; None for the full tensor."""


class TensorMetadata(NamedTuple):
    """Dtype and shape of a tensor, from the manifest."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: tensors by name, and plain values, which may contain tensors."""

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """Errors of newer checkpoints that are damaged, and were skipped for this one."""


class CheckpointMetadata(NamedTuple):
    """Step, tensors and values of a checkpoint before any tensor is read."""

    step: int
    tensors: dict[str, TensorMetadata]
    values: dict[str, Any]


MetadataCheck = Callable[[CheckpointMetadata], None]
"""Raises CheckpointError if a checkpoint does not fit. It must have the same result on all ranks."""


def load(
    folder: str | os.PathLike[str],
    comm: MPI.Intracomm,
    layout_of: LayoutResolver | None = None,
    check: MetadataCheck | None = None,
) -> Checkpoint:
    """Read and verify one checkpoint.

    Collective: call on every rank of ``comm``. A rank reads only the files that hold a part of its blocks.

    Parameters
    ----------
    folder : str or path-like
        Folder of one step.
    comm : MPI.Intracomm
        The ranks.
    layout_of : callable, optional
        Returns the distribution of a tensor, which is then read as a DistTensor on the CPU; or None for the full tensor
        on each rank. Default: all tensors are read in full.
    check : callable, optional
        Raises CheckpointError if the checkpoint does not fit. It is called before memory is allocated.

    Returns
    -------
    Checkpoint
        The contents.

    Raises
    ------
    CheckpointError
        On all ranks, if on any it is incomplete, damaged or of a newer format, or ``check`` rejects it.
    """
    # First, since the folder determines which messages follow.
    check_same_on_all_ranks(comm, "checkpoint to load", str(folder))
    place = Path(folder)
    # All ranks use the manifest of rank 0: on a network file system other ranks may still see an older folder.
    newest = try_on_rank_0(comm, lambda: read_complete_manifest(place), CheckpointError)
    contents = CheckpointMetadata(
        newest["step"],
        {name: TensorMetadata(tensor_dtype(entry), tuple(entry["shape"])) for name, entry in newest["tensors"].items()},
        from_json(newest["values"]),
    )
    if check is not None:
        # A model may not fit on one rank only.
        try_on_all_ranks(comm, lambda: check(contents), _UnfitCheckpointError)
    read = try_on_all_ranks(
        comm, lambda: _CheckpointReader(place, newest, comm, layout_of).read(contents), CheckpointError
    )
    if comm.rank == 0:
        # The rank that deletes old checkpoints need not verify this one again.
        cache_verified(place)
    return read


def load_newest(
    directory: str | os.PathLike[str],
    comm: MPI.Intracomm,
    layout_of: LayoutResolver | None = None,
    check: MetadataCheck | None = None,
    *,
    fallback: bool = False,
) -> Checkpoint | None:
    """Read and verify the checkpoint that was committed last.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    directory : str or path-like
        Folder of a run's checkpoints.
    comm, layout_of, check
        As in :func:`load`.
    fallback : bool
        True skips damaged checkpoints; the result lists their errors. Otherwise the first one raises.

    Returns
    -------
    Checkpoint or None
        The contents; None if there is no finished checkpoint.

    Raises
    ------
    CheckpointError
        On all ranks, if the checkpoint is damaged (with ``fallback``: if all are), or ``check`` rejects it.
    """
    skipped: list[str] = []
    for folder in manifest.newest_first(directory, comm):
        try:
            return replace(load(folder, comm, layout_of, check), skipped=tuple(skipped))
        # The next older checkpoint of another model would not fit either.
        except _UnfitCheckpointError:
            raise
        except CheckpointError as error:
            if not fallback:
                raise
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(f"all checkpoints in {directory} are damaged: {'; '.join(skipped)}")
    return None


class _UnfitCheckpointError(CheckpointError):
    """A checkpoint that may be intact but does not fit: ``fallback`` must not skip it."""


def check_tensors_fit(
    saved: Mapping[str, torch.Tensor | TensorMetadata],
    wanted: Mapping[str, torch.Tensor],
    what: str,
    *,
    strict: bool = True,
    convert_dtype: bool = False,
) -> None:
    """Check that two sets of tensors have the same names, shapes and dtypes.

    Parameters
    ----------
    saved : mapping of str to Tensor or TensorMetadata
        Tensors of the checkpoint.
    wanted : mapping of str to Tensor
        Tensors of the model.
    what : str
        The checkpoint; the error begins with it.
    strict : bool
        True compares the names, too. Otherwise only tensors with a name in both are compared.
    convert_dtype : bool
        True allows other dtypes of the same kind. Otherwise dtypes must be equal.

    Raises
    ------
    CheckpointError
        If there is a difference; the error lists all of them.
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


class _CheckpointReader:
    """The part of :func:`load` on this rank."""

    def __init__(
        self, folder: Path, listing: Mapping[str, Any], comm: MPI.Intracomm, layout_of: LayoutResolver | None
    ) -> None:
        self._folder, self._listing, self._comm = folder, listing, comm
        # One limit for all files together.
        self._until = time.monotonic() + LAG_S
        shapes = {name: entry["shape"] for name, entry in listing["tensors"].items()}
        layouts = {name: layout_of(name, shape) if layout_of else None for name, shape in shapes.items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self._boxes: dict[str, Box] = {name: full_box(shape) for name, shape in shapes.items()}
        self._boxes |= {name: layout.box(None, shapes[name]) for name, layout in self._layouts.items()}

    def read(self, contents: CheckpointMetadata) -> Checkpoint:
        blocks = {
            name: torch.empty([i.extent for i in self._boxes[name]], dtype=tensor_dtype(entry), device="cpu")
            for name, entry in self._listing["tensors"].items()
        }
        # The blocks of all ranks cover each tensor. So every file is read, and verified, by some rank.
        for name in self._listing["files"]:
            needed = [
                (tensor, box)
                for tensor, entry in self._listing["tensors"].items()
                for piece in entry["pieces"]
                if piece["file"] == name and is_needed(box := piece_box(piece), self._boxes[tensor])
            ]
            if needed:
                self._read_file(name, needed, blocks)
        tensors = {
            name: DistTensor(block, self._layouts[name], self._listing["tensors"][name]["shape"])
            if name in self._layouts
            else block
            for name, block in blocks.items()
        }
        # Tensors that belong to plain values are inserted there.
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
        return Checkpoint(contents.step, own, replace_tensor_names(contents.values, tensors))

    def _read_file(self, name: str, needed: Sequence[tuple[str, Box]], blocks: Mapping[str, torch.Tensor]) -> None:
        with self._verified(name) as image:
            try:
                with h5py.File(image, "r") as file:
                    for tensor, box in needed:
                        copy_piece(file, tensor, box, blocks[tensor], self._boxes[tensor])
            # h5py raises any of these for a damaged file.
            except (CheckpointError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
                raise CheckpointError(f"checkpoint {self._folder} is damaged: {error}") from error

    def _verified(self, name: str) -> BinaryIO:
        """Return an open file of the checkpoint after comparing its checksum with the manifest.

        The other ranks wait up to ``LAG_S`` for a file that rank 0 has already found.
        """
        path, entry = self._folder / name, self._listing["files"][name]
        while True:
            try:
                file = open_file(path, entry["bytes"])
                break
            except CheckpointError:
                # Rank 0 has seen all files when it read the manifest.
                if self._comm.rank == 0 or time.monotonic() > self._until:
                    raise
                time.sleep(0.1)
        # In chunks: a rank may need little of a file that is larger than its memory.
        if sha256_of(_read_chunks(file, entry["bytes"])) != entry["sha256"]:
            file.close()
            raise CheckpointError(
                f"checkpoint {self._folder} is damaged: the checksum of {name} is wrong; {manifest.SUGGESTED_FIX}"
            )
        return file


def _read_chunks(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    while nbytes and (piece := read_bytes(file, min(CHUNK_BYTES, nbytes))):
        nbytes -= len(piece)
        yield piece


def read_bytes(file: BinaryIO, nbytes: int) -> bytes:
    """Read the next bytes of a file. Tests replace this function.

    Parameters
    ----------
    file : BinaryIO
        The file, open for reading.
    nbytes : int
        Number of bytes.

    Returns
    -------
    bytes
        Fewer than ``nbytes`` at the end of the file.
    """
    return file.read(nbytes)
