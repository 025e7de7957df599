"""Writing of checkpoints: each rank writes its blocks, then rank 0 the commit mark.

Rank 0 writes what is the same on all ranks. Each block of a sharded tensor is written by the first of the ranks that
have it. No tensor is gathered::

    [w1]  all:     copy the blocks to host memory              training may continue after this
    [w2]  all:     a thread writes the rank's files            state-<digest>.h5, with fsync and rename
    [w3]  finish:  wait until all ranks have written
    [w4]  rank 0:  gather names and checksums, write manifest.json      the commit
    [w5]  rank 0:  delete old checkpoints

Only files with distconv's names are deleted: no other files, no folder that contains any, and nothing that a link leads
to.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import re
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.checkpoint.files import hdf5_image, sha256_of
from distconv.checkpoint.lock import lock_directory
from distconv.checkpoint.manifest import FORMAT, MANIFEST, Commit, commits, encode_manifest, serial_fields, step_folder
from distconv.checkpoint.values import to_json
from distconv.checkpoint.verification import cache_verified, is_intact
from distconv.communication.agreement import allreduce_max, check_same_on_all_ranks, try_on_all_ranks
from distconv.distribution import Box, Interval
from distconv.errors import CheckpointError
from distconv.process import watchdog
from distconv.tensor import DistTensor
from distconv.whole_files import PARTIAL, Folder

_OURS = re.compile(rf"state-[0-9a-f]{{12}}\.h5|{re.escape(MANIFEST)}|.*{re.escape(PARTIAL)}")
"""Names of the files that a save leaves in the folder of its step, finished or not."""

_POLL_S = 0.5
"""Seconds that a rank waits for its own thread before all ranks compare again whether any still writes."""

Entry = dict[str, Any]
"""A JSON object of the manifest."""


class AsyncSave:
    """A checkpoint that a thread writes while training continues.

    The tensors are copied to host memory at construction. The checkpoint does not count until :meth:`finish` has
    committed it. Collective: construct on every rank of ``comm``.

    Parameters
    ----------
    directory : str or path-like
        Folder of the run's checkpoints; it is created if needed.
    step : int
        Number of the step.
    tensors : mapping of str to Tensor
        Tensors by name: DistTensors, or tensors that are identical on all ranks.
    values : mapping of str to object
        Plain values, as :func:`~distconv.checkpoint.values.to_json` takes them. Rank 0's are saved.
    comm : MPI.Intracomm
        The ranks.

    Raises
    ------
    CheckpointError
        On all ranks, if a value or a tensor cannot be saved, or another job has locked the folder.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        comm: MPI.Intracomm,
    ) -> None:
        check_same_on_all_ranks(comm, "checkpoint", f"step {step} in {directory}")
        number = _check_step(step)
        self.folder, self._comm = step_folder(directory, number).absolute(), comm
        self._manifest: Entry = {"format": FORMAT, "step": number}
        tensors = {**tensors, **try_on_all_ranks(comm, lambda: self._prepare(values), CheckpointError)}
        try_on_all_ranks(comm, lambda: self._check_storable(tensors), CheckpointError)
        # None where another rank writes the same block.
        boxes = {name: box for name, x in tensors.items() if (box := _box_to_write(x, comm.rank)) is not None}
        # Tensors that all ranks need and sharded ones go to different files: a rank reads, and verifies, full files.
        parts = [[name for name in boxes if isinstance(tensors[name], DistTensor) == split] for split in (False, True)]
        # On all ranks: one of them may lack the memory.
        self._parts = try_on_all_ranks(
            comm, lambda: [{name: _copy_to_host(tensors[name]) for name in part} for part in parts], CheckpointError
        )
        self._entries: Entry = {
            name: {
                "dtype": str(tensors[name].dtype),
                "shape": list(tensors[name].shape),
                "pieces": [{"box": [[i.start, i.stop] for i in box]}],
            }
            for name, box in boxes.items()
        }
        self._files: Entry = {}
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="distconv-checkpoint")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """True if this rank has written its files, so that :meth:`finish` waits only for other ranks."""
        return not self._thread.is_alive()

    @property
    def nbytes(self) -> int:
        """Bytes of the files that this rank has written."""
        return sum(file["bytes"] for file in self._files.values())

    def _prepare(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Encode the values and lock the folder; return the tensors among the values."""
        tensors: dict[str, torch.Tensor] = {}
        try:
            self._manifest["values"] = {
                name: to_json(value, f"value {name!r}", tensors) for name, value in values.items()
            }
        except (ValueError, RecursionError) as error:
            raise self._write_error(error) from error
        try:
            if self._comm.rank == 0:
                # Only rank 0 locks: the lock is for the job, not for a rank.
                lock_directory(self.folder.parent)
        except OSError as error:
            raise self._write_error(error) from error
        return tensors

    def _check_storable(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            block = tensor.local if isinstance(tensor, DistTensor) else tensor
            if block.layout is not torch.strided or block.is_quantized or block.is_meta:
                kind = "quantized" if block.is_quantized else "on the meta device" if block.is_meta else block.layout
                raise self._write_error(ValueError(f"tensor {name!r} is {kind}. Save it as a dense tensor."))

    def _write(self) -> None:
        try:
            with (
                Folder(self.folder.parent, make=True) as directory,
                Folder(self.folder.name, make=True, within=directory) as folder,
            ):
                for blocks in filter(None, self._parts):
                    self._write_file(folder, blocks)
        except Exception as error:  # of any kind: finish() must not commit files that are missing
            self._failed = error

    def _write_file(self, folder: Folder, blocks: dict[str, torch.Tensor]) -> None:
        # The checksum is computed while the file is written, from the same memory.
        pieces = hdf5_image(blocks)
        with ThreadPoolExecutor(1) as hasher:
            hashed = hasher.submit(sha256_of, pieces)
            partial = folder.write_temporary(f"state-{self._comm.rank}", pieces)
            digest = hashed.result()
        # The name depends on rank and content: ranks may have equal blocks, and files of a finished checkpoint of the
        # same step must not be replaced before the new one is committed.
        name = f"state-{hashlib.sha256(f'{self._comm.rank} {digest}'.encode()).hexdigest()[:12]}.h5"
        folder.rename(partial, name)
        for tensor in blocks:
            self._entries[tensor]["pieces"][0]["file"] = name
        # Memory of the copies is free from here on, while other ranks may still write.
        blocks.clear()
        self._files[name] = {"bytes": sum(map(len, pieces)), "sha256": digest}

    def finish(self, keep: int = 2) -> Path:
        """Wait until all ranks have written, commit the checkpoint, and delete older ones.

        Collective: call on every rank. Rank 0 warns if the step is below that of the last commit.

        Parameters
        ----------
        keep : int
            Number of intact checkpoints that stay, the last committed ones, this one included.

        Returns
        -------
        Path
            Folder of the checkpoint.

        Raises
        ------
        CheckpointError
            On all ranks, with the system's reason, if the checkpoint could not be written, or ``keep`` is below 0;
            earlier checkpoints are intact.
        """
        remarks: list[str] = []
        keep = check_keep(keep)
        try:
            # Each wait is short: a slow disk must not look like a deadlock to the watchdog. All ranks leave the loop in
            # the same iteration, since all get the same maximum.
            while True:
                self._thread.join(_POLL_S)
                writes = self._thread.is_alive()
                if not allreduce_max(self._comm, int(writes), "end of the writing of a checkpoint"):
                    break
            try_on_all_ranks(self._comm, self._check_written, CheckpointError)
            with watchdog.waiting(lambda: "names of what all ranks have written"):
                written = self._comm.gather((self._files, self._entries), root=0)
            # Only rank 0 has received what was written. The other ranks wait for the outcome of the commit.
            try_on_all_ranks(
                self._comm,
                lambda: remarks.extend(self._commit(written, keep)) if written else None,
                CheckpointError,
            )
        except CheckpointError:
            if self._comm.rank == 0 and not (self.folder / MANIFEST).is_file():
                # The files of ranks that succeeded would keep a full disk full.
                with contextlib.suppress(OSError):
                    _delete(self.folder)
            raise
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)
        return self.folder

    def _check_written(self) -> None:
        if self._failed is not None:
            raise self._write_error(self._failed)

    def _write_error(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} could not be written: {error or type(error).__name__}")

    def _commit(self, written: list[tuple[Entry, Entry]], keep: int) -> list[str]:
        """Write the manifest, which commits the checkpoint; return the warnings."""
        files: Entry = {}
        tensors: Entry = {}
        for own_files, entries in written:
            files |= own_files
            for name, entry in entries.items():
                # Ranks that have blocks of one tensor add a piece each.
                tensors.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
        directory = self.folder.parent
        try:
            earlier = [each for each in commits(directory) if each.folder != self.folder]
            content = encode_manifest({**self._manifest, **serial_fields(earlier), "files": files, "tensors": tensors})
            with Folder(directory) as above, Folder(self.folder.name, within=above) as folder:
                # The commit: the manifest is complete on disk before it gets its name. Files that it lists were
                # synchronized before.
                folder.write(MANIFEST, [memoryview(content)])
                # The entry of the new folder, without which the commit would be lost in a power failure.
                above.sync()
        except OSError as error:
            raise self._write_error(error) from error
        # Committed: whatever fails from here on is a warning, not an error.
        return [*self._describe_step_back(earlier), *_clean_up(self.folder, {*files, MANIFEST}, earlier, keep)]

    def _describe_step_back(self, earlier: list[Commit]) -> list[str]:
        """Return a warning if the step is below that of the last commit."""
        step, last = self._manifest["step"], earlier[-1] if earlier else None
        if last is None or last.step <= step:
            return []
        return [
            f"checkpoint {self.folder} has an earlier step than {last.folder.name}, which was committed before it: the "
            "run has gone back. The last commit, not the highest step, is loaded first and kept longest."
        ]


def save(
    directory: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    comm: MPI.Intracomm,
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint and wait for it.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    directory, step, tensors, values, comm
        As in :class:`AsyncSave`.
    keep : int
        As in :meth:`AsyncSave.finish`.

    Returns
    -------
    Path
        Folder of the checkpoint.

    Raises
    ------
    CheckpointError
        On all ranks, with the system's reason, if it could not be written; earlier checkpoints are intact.
    """
    keep = check_keep(keep)
    return AsyncSave(directory, step, tensors, values, comm).finish(keep)


def check_keep(keep: Any) -> int:
    """Return the number of checkpoints to keep.

    Raises
    ------
    CheckpointError
        If it is not an integer from 0 on. The new checkpoint is never deleted, so 0 has the effect of 1.
    """
    try:
        number = operator.index(keep)
    except TypeError:
        number = -1
    if number < 0 or isinstance(keep, bool):
        raise CheckpointError(
            f"save_checkpoint: keep={keep!r} is not a number of checkpoints. Name how many may stay; a large number "
            "keeps all."
        )
    return number


def _box_to_write(tensor: torch.Tensor, rank: int) -> Box | None:
    """Return the box of ``tensor`` that this rank writes; None if another rank writes its block."""
    if not isinstance(tensor, DistTensor):
        return tuple(Interval(0, extent) for extent in tensor.shape) if rank == 0 else None
    replicated = set(tensor.grid.coords) - set(tensor.dist.split_axes)
    # Of the ranks that hold the same block, the first one along each replicated axis.
    first = all(tensor.grid.coords[axis] == 0 for axis in replicated)
    return tensor.dist.box(None, tensor.shape) if first else None


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    block = tensor.local if isinstance(tensor, DistTensor) else tensor
    return block.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"a checkpoint cannot be of step {step!r}. Pass a whole number from 0 on.")
    return number


def _clean_up(folder: Path, committed_files: set[str], earlier: list[Commit], keep: int) -> list[str]:
    """Delete leftovers of earlier attempts at this step, and old checkpoints; return a warning if that fails."""
    try:
        _delete(folder, but=committed_files)
        cache_verified(folder)
        _delete_old(earlier, keep - 1)
    except OSError as error:
        return [f"checkpoint {folder} is committed, but older checkpoints could not be deleted: {error}"]
    return []


def _delete_old(earlier: list[Commit], keep: int) -> None:
    """Delete all checkpoints before the last ``keep`` intact ones, except those with an unreadable manifest."""
    intact = 0
    # From the newest to the oldest.
    for each in reversed(earlier if len(earlier) > keep else []):
        if intact < keep:
            intact += is_intact(each.folder)
        elif each.serial is not None:
            _delete(each.folder)


def _delete(step: Path, but: set[str] | frozenset[str] = frozenset()) -> None:
    """Delete distconv's files from the folder of a step, and the folder if it is then empty."""
    with Folder(step.parent) as directory:
        with Folder(step.name, within=directory) as folder:
            names = [name for name in folder.names() if _OURS.fullmatch(name) and name not in but]
            # The commit mark goes first: a checkpoint that is deleted in part must not count as one.
            for name in sorted(names, key=lambda name: name != MANIFEST):
                with contextlib.suppress(IsADirectoryError):
                    folder.remove(name)
        if not but:
            with contextlib.suppress(OSError):
                directory.remove_folder(step.name)
