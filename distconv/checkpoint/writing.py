"""Writing of checkpoints: each rank its pieces, and when all are on the disk the commit mark.

Rank 0 writes what is the same on all ranks; of a sharded tensor every block is written by the first of the ranks that
have it. Nothing is gathered.

What is deleted bears our names: nobody else's files, no folder that they lie in, and nothing that a link leads to.
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

from distconv.checkpoint.files import digest_of, file_of
from distconv.checkpoint.lock import lock
from distconv.checkpoint.manifest import FORMAT, MANIFEST, Commit, behind, commits, folder_of, text_of
from distconv.checkpoint.values import to_json
from distconv.checkpoint.verification import is_whole, note_whole
from distconv.communication.agreement import allreduce_max, check_same_on_all_ranks, try_on_all_ranks
from distconv.distribution import Box, Interval
from distconv.errors import CheckpointError
from distconv.process import watchdog
from distconv.tensor import DistTensor
from distconv.whole_files import PARTIAL, Folder

_OURS = re.compile(rf"state-[0-9a-f]{{12}}\.h5|{re.escape(MANIFEST)}|.*{re.escape(PARTIAL)}")
"""What a save leaves in the folder of its step, finished or not."""

_PATIENCE_S = 0.5
"""How long a rank that still writes lets the others wait before they ask again."""

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
        check_same_on_all_ranks(comm, "checkpoint", f"step {step} in {directory}")
        number = _step_of(step)
        self.folder, self._comm = folder_of(directory, number).absolute(), comm
        self._manifest: Entry = {"format": FORMAT, "step": number}
        tensors = {**tensors, **try_on_all_ranks(comm, lambda: self._begin(values), CheckpointError)}
        try_on_all_ranks(comm, lambda: self._check_storable(tensors), CheckpointError)
        boxes = {name: box for name, x in tensors.items() if (box := _box_to_write(x, comm.rank)) is not None}
        # What all ranks need and what some need lie apart.
        parts = [[name for name in boxes if isinstance(tensors[name], DistTensor) == split] for split in (False, True)]
        self._parts = try_on_all_ranks(
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

    def _begin(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Take the values; the tensors among them."""
        tensors: dict[str, torch.Tensor] = {}
        try:
            self._manifest["values"] = {
                name: to_json(value, f"value {name!r}", tensors) for name, value in values.items()
            }
        except (ValueError, RecursionError) as error:
            raise self._cannot(error) from error
        try:
            if self._comm.rank == 0:
                lock(self.folder.parent)
        except OSError as error:
            raise self._cannot(error) from error
        return tensors

    def _check_storable(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            block = tensor.local if isinstance(tensor, DistTensor) else tensor
            if block.layout is not torch.strided or block.is_quantized or block.is_meta:
                kind = "quantized" if block.is_quantized else "on the meta device" if block.is_meta else block.layout
                raise self._cannot(ValueError(f"tensor {name!r} is {kind}. Save it as a dense tensor."))

    def _write(self) -> None:
        try:
            with (
                Folder(self.folder.parent, make=True) as directory,
                Folder(self.folder.name, make=True, within=directory) as folder,
            ):
                for blocks in filter(None, self._parts):
                    self._write_file(folder, blocks)
        except Exception as error:  # whatever it is: finish() must not commit what is not there
            self._failed = error

    def _write_file(self, folder: Folder, blocks: dict[str, torch.Tensor]) -> None:
        pieces = file_of(blocks)
        with ThreadPoolExecutor(1) as beside:
            hashed = beside.submit(digest_of, pieces)
            partial = folder.write_temporary(f"state-{self._comm.rank}", pieces)
            digest = hashed.result()
        # A name for each rank and content: ranks may have equal blocks, and a finished step is not written over.
        name = f"state-{hashlib.sha256(f'{self._comm.rank} {digest}'.encode()).hexdigest()[:12]}.h5"
        folder.rename(partial, name)
        for tensor in blocks:
            self._entries[tensor]["pieces"][0]["file"] = name
        blocks.clear()
        self._files[name] = {"bytes": sum(map(len, pieces)), "sha256": digest}

    def finish(self, keep: int = 2) -> Path:
        """Wait until all ranks have written, and commit; the ``keep`` that were committed last and are whole stay.

        Older ones are deleted. Collective. Returns the folder. Where the step is an earlier one than that of the last
        commit, rank 0 warns.

        Raises
        ------
        CheckpointError
            On all ranks, with the system's reason, if it could not be written, or ``keep`` is below 0; earlier
            checkpoints are intact.
        """
        remarks: list[str] = []
        keep = checked_keep(keep)
        try:
            # No rank waits for long in one call: a disk may be slower than what the watchdog takes for a deadlock.
            while allreduce_max(self._comm, int(self._still_writes()), "end of the writing of a checkpoint"):
                pass
            try_on_all_ranks(self._comm, self._check_written, CheckpointError)
            with watchdog.waiting(lambda: "names of what all ranks have written"):
                written = self._comm.gather((self._files, self._entries), root=0)
            try_on_all_ranks(
                self._comm, lambda: remarks.extend(self._commit(written, keep)) if written else None, CheckpointError
            )
        except CheckpointError:
            if self._comm.rank == 0 and not (self.folder / MANIFEST).is_file():
                # A full disk needs the room that the others' files take.
                with contextlib.suppress(OSError):
                    _delete(self.folder)
            raise
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)
        return self.folder

    def _still_writes(self) -> bool:
        self._thread.join(_PATIENCE_S)
        return self._thread.is_alive()

    def _check_written(self) -> None:
        if self._failed is not None:
            raise self._cannot(self._failed)

    def _cannot(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} could not be written: {error or type(error).__name__}")

    def _commit(self, written: list[tuple[Entry, Entry]], keep: int) -> list[str]:
        """Write the commit mark; what is to be said of it."""
        files: Entry = {}
        tensors: Entry = {}
        for own_files, entries in written:
            files |= own_files
            for name, entry in entries.items():
                tensors.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
        directory = self.folder.parent
        try:
            earlier = [each for each in commits(directory) if each.folder != self.folder]
            content = text_of({**self._manifest, **behind(earlier), "files": files, "tensors": tensors})
            with Folder(directory) as above, Folder(self.folder.name, within=above) as folder:
                folder.write(MANIFEST, [memoryview(content)])
                above.sync()
        except OSError as error:
            raise self._cannot(error) from error
        # It is committed: nothing that fails from here on makes it less than that.
        return [*self._gone_back(earlier), *_tidied(self.folder, {*files, MANIFEST}, earlier, keep)]

    def _gone_back(self, earlier: list[Commit]) -> list[str]:
        step, last = self._manifest["step"], earlier[-1] if earlier else None
        if last is None or last.step <= step:
            return []
        return [
            f"checkpoint {self.folder} is of an earlier step than {last.folder.name}, which was committed before it: "
            "the run has gone back; what was committed last is loaded first and kept longest"
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
    """Write ``tensors`` (distributed, or equal on all ranks) and ``values`` as this step's checkpoint. Collective.

    The ``keep`` that were committed last and are whole stay; older ones are deleted once this one is committed.

    Raises
    ------
    CheckpointError
        On all ranks, with the system's reason, if it could not be written; earlier checkpoints are intact.
    """
    keep = checked_keep(keep)
    return Saving(directory, step, tensors, values, comm).finish(keep)


def checked_keep(keep: Any) -> int:
    """Return how many checkpoints are kept.

    Raises
    ------
    CheckpointError
        If it is not a whole number from 0 on; the new one stays in any case.
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


def _step_of(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"a checkpoint cannot be of step {step!r}; count steps by whole numbers from 0 on")
    return number


def _tidied(folder: Path, of_it: set[str], earlier: list[Commit], keep: int) -> list[str]:
    """Delete what earlier attempts at this step have left, and old checkpoints; what could not be deleted, and why."""
    try:
        _delete(folder, but=of_it)
        note_whole(folder)
        _delete_old(earlier, keep - 1)
    except OSError as error:
        return [f"checkpoint {folder} is committed, but what is older could not be deleted: {error}"]
    return []


def _delete_old(earlier: list[Commit], keep: int) -> None:
    """Delete all that were committed before the last ``keep`` that are whole, but what this version cannot read."""
    whole = 0
    for each in reversed(earlier if len(earlier) > keep else []):
        if whole < keep:
            whole += is_whole(each.folder)
        elif each.serial is not None:
            _delete(each.folder)


def _delete(step: Path, but: set[str] | frozenset[str] = frozenset()) -> None:
    """Delete our files from the folder of a step, and the folder if nothing else is in it."""
    with Folder(step.parent) as directory:
        with Folder(step.name, within=directory) as folder:
            names = [name for name in folder.names() if _OURS.fullmatch(name) and name not in but]
            # The mark goes first: half a checkpoint must not count as one.
            for name in sorted(names, key=lambda name: name != MANIFEST):
                with contextlib.suppress(IsADirectoryError):
                    folder.remove(name)
        if not but:
            with contextlib.suppress(OSError):
                directory.remove_folder(step.name)
