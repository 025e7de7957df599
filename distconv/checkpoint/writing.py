"""Writing of checkpoints: each rank its pieces, and when all are on the disk the commit mark.

Rank 0 writes what is the same on all ranks; of a sharded tensor every block is written by the first of the ranks that
have it. Nothing is gathered.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.checkpoint.files import digest_of, file_of, rename_synced, sync_folder, write_file, write_synced
from distconv.checkpoint.lock import lock
from distconv.checkpoint.manifest import FORMAT, MANIFEST, finished, folder_of, text_of
from distconv.communication.agreement import agree, together
from distconv.distribution import Box, Interval
from distconv.errors import CheckpointError
from distconv.tensor import DistTensor

Entry = dict[str, Any]


class Saving:
    """A checkpoint on its way to the disk: the tensors are copied when it is made. Collective.

    A thread writes this rank's file, and training may go on. ``finish`` commits the checkpoint; until then the step
    does not count.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        step: int,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        comm: MPI.Intracomm,
    ) -> None:
        agree(comm, "checkpoint", f"step {step} in {directory}")
        self.folder, self._comm = folder_of(directory, step), comm
        self._manifest: Entry = {"format": FORMAT, "step": step, "values": copy.deepcopy(dict(values))}
        together(comm, self._begin, CheckpointError)
        boxes = {name: box for name, x in tensors.items() if (box := _box_to_write(x, comm.rank)) is not None}
        # What all ranks need and what some need lie apart.
        parts = [[name for name in boxes if isinstance(tensors[name], DistTensor) == split] for split in (False, True)]
        self._parts = together(
            comm, lambda: [{name: _copied(tensors[name]) for name in part} for part in parts], CheckpointError
        )
        self._entries = {name: _entry(tensors[name], box) for name, box in boxes.items()}
        self._files: Entry = {}
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="distconv-checkpoint")
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank is done, and ``finish`` waits for others alone."""
        return not self._thread.is_alive()

    @property
    def nbytes(self) -> int:
        """Bytes of the files that this rank has written."""
        return sum(file["bytes"] for file in self._files.values())

    def _begin(self) -> None:
        text_of(self._manifest)
        try:
            if self._comm.rank == 0:
                lock(self.folder.parent)
        except OSError as error:
            raise self._cannot(error) from error

    def _write(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for blocks in filter(None, self._parts):
                self._write_file(blocks)
        except Exception as error:  # whatever it is: finish() must not commit what is not there
            self._failed = error

    def _write_file(self, blocks: dict[str, torch.Tensor]) -> None:
        pieces, partial = file_of(blocks), self.folder / f"state-{self._comm.rank}.partial"
        with ThreadPoolExecutor(1) as beside:
            hashed = beside.submit(digest_of, pieces)
            write_synced(partial, pieces)
            digest = hashed.result()
        # A name for each rank and content: ranks may have equal blocks, and a finished step is not written over.
        name = f"state-{hashlib.sha256(f'{self._comm.rank} {digest}'.encode()).hexdigest()[:12]}.h5"
        rename_synced(partial, self.folder / name)
        for tensor in blocks:
            self._entries[tensor]["pieces"][0]["file"] = name
        blocks.clear()
        self._files[name] = {"bytes": sum(map(len, pieces)), "sha256": digest}

    def finish(self, keep: int = 2) -> Path:
        """Wait until all ranks have written, and commit; of the finished checkpoints the newest ``keep`` stay.

        Collective. Returns the folder.

        Raises
        ------
        CheckpointError
            On all ranks, with the system's reason, if it could not be written; earlier checkpoints are intact.
        """
        try:
            together(self._comm, self._wait, CheckpointError)
            found = self._comm.gather((self._files, self._entries), root=0)
            together(self._comm, lambda: self._commit(found, keep) if found else None, CheckpointError)
        except CheckpointError:
            if self._comm.rank == 0 and not (self.folder / MANIFEST).is_file():
                # A full disk needs the room that the others' files take.
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self.folder

    def _wait(self) -> None:
        self._thread.join()
        if self._failed is not None:
            raise self._cannot(self._failed)

    def _cannot(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} could not be written: {error or type(error).__name__}")

    def _commit(self, found: list[tuple[Entry, Entry]], keep: int) -> None:
        files: Entry = {}
        tensors: Entry = {}
        for own_files, entries in found:
            files |= own_files
            for name, entry in entries.items():
                tensors.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
        try:
            write_file(self.folder / MANIFEST, text_of({**self._manifest, "files": files, "tensors": tensors}))
            sync_folder(self.folder.parent)
            for left in self.folder.iterdir():
                if left.name not in (*files, MANIFEST):
                    left.unlink()
            _delete_old(self.folder.parent, keep)
        except OSError as error:
            raise self._cannot(error) from error


def save(
    directory: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    comm: MPI.Intracomm,
    *,
    keep: int = 2,
) -> Path:
    """Write ``tensors`` (distributed, or equal on all ranks) and ``values`` as this step's checkpoint. Collective.

    The newest ``keep`` are kept; older ones are deleted once this one is committed.

    Raises
    ------
    CheckpointError
        On all ranks, with the system's reason, if it could not be written; earlier checkpoints are intact.
    """
    return Saving(directory, step, tensors, values, comm).finish(keep)


def _box_to_write(tensor: torch.Tensor, rank: int) -> Box | None:
    """The box of ``tensor`` that this rank writes, if any."""
    if not isinstance(tensor, DistTensor):
        return tuple(Interval(0, extent) for extent in tensor.shape) if rank == 0 else None
    replicated = set(tensor.grid.coords) - set(tensor.dist.split_axes)
    first = all(tensor.grid.coords[axis] == 0 for axis in replicated)
    return tensor.dist.box(None, tensor.shape) if first else None


def _entry(tensor: torch.Tensor, box: Box) -> Entry:
    piece = {"box": [[i.start, i.stop] for i in box]}
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "pieces": [piece]}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    block = tensor.local if isinstance(tensor, DistTensor) else tensor
    return block.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _delete_old(directory: Path, keep: int) -> None:
    steps = finished(directory)
    for step in sorted(steps)[: max(0, len(steps) - max(keep, 1))]:
        # The mark goes first: half a checkpoint must not count as one.
        (steps[step] / MANIFEST).unlink()
        shutil.rmtree(steps[step])
