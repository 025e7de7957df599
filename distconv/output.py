"""The interface of outputs: datasets that ranks write together, some rows at a time, and that a later job resumes.

:mod:`distconv.writing` opens outputs and has those of zarr and HDF5; :mod:`distconv.volume_files` has those of NIfTI.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.coordinates import VariableLabels
from distconv.distribution import Box, Distribution, Interval
from distconv.errors import DataError
from distconv.tensor import DistTensor
from distconv.text_files import File, decode, parse_json
from distconv.whole_files import open_regular, write_file

PROGRESS = "progress.json"
"""Name of the note about an unfinished output among its parts."""


class Output(ABC):
    """A dataset that ranks write together, some rows at a time, from the first to the last.

    Collective: make it and call its methods on every rank of ``comm``. :func:`open_output` makes it.

    Attributes
    ----------
    rows : int
        Number of rows that are written.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        comm: MPI.Intracomm,
        note: Any,
        labels: VariableLabels,
    ) -> None:
        self.path, self.name, self.shape, self.dtype, self.comm, self.note = path, name, shape, dtype, comm, note
        self.labels = labels
        rows = try_on_all_ranks(comm, lambda: self._begin_or_resume() if comm.rank == 0 else None, DataError)
        # After rank 0 has made the output, which the other ranks open.
        self.rows = int(comm.bcast(rows, root=0))
        try_on_all_ranks(comm, self._open, DataError)

    @property
    def signature(self) -> str:
        """String that an unfinished output must have stored to be resumed. Datasets of one ``write`` have the same."""
        if "datasets" in self.note:
            return json.dumps({"datasets": self.note["datasets"], "coords": self.note.get("coords", {})})
        return f"{self.name}, {json.dumps(self.note, sort_keys=True)}"

    @abstractmethod
    def _begin_or_resume(self) -> int:
        """Create the output if it does not exist; return the number of written rows. Called on rank 0."""

    @abstractmethod
    def _open(self) -> None:
        """Prepare for writing, on each rank."""

    @abstractmethod
    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        """Return the distribution under which ranks write rows from ``begin`` on."""

    @abstractmethod
    def _write_block(self, box: Box, block: torch.Tensor) -> None:
        """Write this rank's block."""

    @abstractmethod
    def _record_rows(self, rows: int, boxes: list[Box | None]) -> None:
        """Store the number of written rows, and the boxes that ranks have just written. Called on rank 0."""

    @abstractmethod
    def _finalize(self) -> None:
        """Mark the output as complete. Called on rank 0."""

    def write(self, begin: int, tensor: DistTensor) -> None:
        """Write rows, and drop rows that were written after them.

        Collective: call on every rank.

        Parameters
        ----------
        begin : int
            The first row, at most ``rows``.
        tensor : DistTensor
            The rows.

        Raises
        ------
        DataError
            On every rank, if the rows do not fit, or cannot be written.
        """
        with torch.no_grad():
            if begin > self.rows or tensor.shape[1:] != self.shape[1:] or begin + len(tensor) > self.shape[0]:
                raise DataError(
                    f"{self.path}: rows {begin} to {begin + len(tensor)} of {tuple(tensor.shape[1:])} do not fit "
                    f"after {self.rows} rows of {self.shape}"
                )
            aligned = tensor.redistribute(self._distribution(begin, tensor))
            box = aligned.dist.box(None, aligned.shape)
            box = (Interval(box[0].start + begin, box[0].stop + begin), *box[1:])
            # Of the ranks that hold the same block, the one with coordinate 0 along the other axes writes it.
            is_writer = all(aligned.grid.coords[a] == 0 for a in aligned.grid.shape if a not in aligned.dist.split_axes)
            mine = box if is_writer and aligned.local.numel() else None
            block = aligned.local.to("cpu", self.dtype).contiguous()
            try_on_all_ranks(self.comm, lambda: None if mine is None else self._write_block(mine, block), DataError)
        # Only after all blocks are written are the rows recorded. After a crash in between they are written again.
        boxes = self.comm.gather(mine, root=0)
        # Rows that an earlier call has written after these do not count any more.
        self.rows = begin + len(tensor)

        def note() -> None:
            if boxes is not None:
                self._record_rows(self.rows, boxes)

        try_on_all_ranks(self.comm, note, DataError)

    def finish(self) -> None:
        """Mark the output as complete.

        Collective: call on every rank.

        Raises
        ------
        DataError
            On every rank, if rows are missing, or the file cannot be written.
        """
        if self.rows < self.shape[0]:
            raise DataError(f"{self.path}: {self.rows} of {self.shape[0]} rows are written")
        try_on_all_ranks(self.comm, lambda: self._finalize() if self.comm.rank == 0 else None, DataError)


class PartsOutput(Output):
    """An output of which ranks write parts into the folder ``NAME.parts``; ``NAME`` appears at the end."""

    def _begin_or_resume(self) -> int:
        if self.path.exists():
            raise DataError(f"{self.path} already exists. Remove it, or choose another name.")
        self._pieces: list[Piece] = []
        self._parts.mkdir(parents=True, exist_ok=True)
        begun = read_progress(self.path)
        if begun is None:
            if next(self._parts.iterdir(), None) is not None:
                raise DataError(f"{self._parts} contains other files. Remove it, or choose another name.")
            self._record_rows(0, [])
            return 0
        if begun.whole != self.signature:
            raise DataError(f"{self._parts} contains another unfinished output. Remove it, or choose another name.")
        self._pieces = begun.pieces
        return begun.rows

    @property
    def _parts(self) -> Path:
        return parts_folder(self.path)

    def _open(self) -> None:
        """Do nothing: each write opens a file of its own."""

    def _write_progress(self, rows: int) -> None:
        progress = {"rows": rows, "whole": self.signature, "pieces": self._pieces}
        write_file(self._parts / PROGRESS, json.dumps(progress))


Piece = tuple[str, str, list[tuple[int, int]]]
"""A file of a rank, its dataset, and where its values belong."""


class OutputState(File):
    """Schema of what is stored about an unfinished output."""

    rows: int
    """Number of written rows."""
    whole: str
    """The ``signature`` of the complete output."""


class Progress(OutputState):
    """Schema of ``progress.json``, with the box of each file."""

    pieces: list[Piece]


def read_progress(path: Path) -> Progress | None:
    """Return what is stored about an unfinished output with parts, or None if no output was begun.

    Parameters
    ----------
    path : Path
        Path of the output.

    Returns
    -------
    Progress or None

    Raises
    ------
    DataError
        If the note is damaged.
    """
    note = parts_folder(path) / PROGRESS
    if not os.path.lexists(note):
        return None
    with open_regular(note, follow_links=False) as file:
        text = file.read().decode(errors="replace")
    return decode(parse_json(text, str(note), DataError), Progress, str(note), DataError)


def parts_folder(path: Path) -> Path:
    """Return the folder of an output's parts."""
    return path.with_name(f"{path.name}.parts")
