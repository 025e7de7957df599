"""Tensors on their way to files: each rank writes its own part, and nothing is gathered.

``.zarr`` is a zarr group: ranks trade the rows at the borders of their blocks first, so that a chunk has one writer.
``.h5`` is a virtual dataset over files of the ranks, in the folder ``NAME.h5.parts`` beside it: HDF5 needs no MPI then.
What is not finished says so, and is gone on with.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.files import hdf5_image
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.formats.zarr_groups import UNFINISHED
from distconv.distribution import Box, Distribution, Interval, block_range
from distconv.errors import DataError
from distconv.precision import HALF
from distconv.tensor import DistTensor
from distconv.text_files import File, decoded, parsed_json
from distconv.whole_files import Folder, open_regular, write_file

_LARGEST_CHUNK = 128
_ROWS = 1024
"""Of a chunk of what has no space."""

_PROGRESS = "progress.json"


def write(tensor: DistTensor, path: str | os.PathLike[str], name: str = "values") -> None:
    """Write a distributed tensor to the dataset ``name`` of a new zarr group (.zarr) or HDF5 file (.h5). Collective.

    Each rank writes its own part. An unfinished output of the same shape is written anew.

    Raises
    ------
    DataError
        On all ranks, if the tensor is not distributed or has no dimensions, there is something else of that name, or it
        cannot be written.
    """
    if not isinstance(tensor, DistTensor):
        raise DataError(
            f"write: a {type(tensor).__name__} is not distributed. Pass a distributed tensor, dc.scatter(x, grid), or "
            "write it on one rank."
        )
    output = open_output(path, name, tuple(tensor.shape), tensor.dtype, tensor.grid.world, note={})
    output.write(0, tensor)
    output.finish()


def open_output(
    path: str | os.PathLike[str],
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    comm: MPI.Intracomm,
    *,
    note: Mapping[str, Any],
) -> Output:
    """A dataset of ``shape`` in a new zarr group or HDF5 file, or one begun with the same ``note``. Collective.

    Raises
    ------
    DataError
        On all ranks, if there is something else, the name has another ending, or it cannot be written.
    """
    place = Path(path)
    described = {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), **note}
    check_same_on_all_ranks(comm, f"output {place}", f"{name}, {json.dumps(described, sort_keys=True)}")
    if not shape:
        raise DataError(f"write: {place}: a single number has no rows. Write x.reshape(1), or print it.")
    if not isinstance(name, str) or not name.strip("/"):
        raise DataError(f"write: {place}: a dataset cannot be called {name!r}. Give it a name.")
    kind = {".zarr": _Zarr, ".h5": _Hdf5}.get(place.suffix)
    if kind is None:
        raise DataError(f"{place}: an output is a zarr group, NAME.zarr, or an HDF5 file, NAME.h5")
    if kind is _Hdf5 and ("%" in place.name or place.name != os.fsencode(place.name).decode(errors="replace")):
        raise DataError(
            f"write: {place}: HDF5 finds no parts with % or without UTF-8 in their names. Choose another name."
        )
    dtype = torch.float32 if dtype in HALF else dtype
    if dtype.is_complex or not hasattr(np, str(dtype).removeprefix("torch.")):
        raise DataError(f"write: {place}: values of {dtype} cannot be read as samples. Write real numbers of NumPy.")
    described["dtype"] = str(dtype).removeprefix("torch.")
    return kind(place.absolute(), name, tuple(shape), dtype=dtype, comm=comm, note=described)


def rows_written(path: Path, comm: MPI.Intracomm) -> int:
    """How many rows an output has that is not finished; 0 if there is none. Collective.

    Raises
    ------
    DataError
        On all ranks, if something else of that name is there.
    """

    def look() -> int:
        if not path.exists():
            progress = _progress(path)
            return progress.rows if progress else 0
        begun = _zarr(path).open_group(path, mode="r").attrs.get(UNFINISHED) if path.suffix == ".zarr" else None
        if begun is None:
            raise DataError(f"{path} is there already; remove it, or name another")
        return decoded(begun, _Begun, f"{path}: {UNFINISHED}", DataError).rows

    return try_on_rank_0(comm, look, DataError)


class Output(ABC):
    """A dataset that ranks write together, some rows at a time, from the first to the last. Collective."""

    def __init__(
        self, path: Path, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, comm: MPI.Intracomm, note: Any
    ) -> None:
        self.path, self.name, self.shape, self.dtype, self.comm, self.note = path, name, shape, dtype, comm, note
        rows = try_on_all_ranks(comm, lambda: self._begun() if comm.rank == 0 else None, DataError)
        self.rows = int(comm.bcast(rows, root=0))
        """How many are written."""
        try_on_all_ranks(comm, self._open, DataError)

    @property
    def whole(self) -> str:
        """What an earlier output must be, for its unfinished part to be gone on with."""
        return f"{self.name}, {json.dumps(self.note, sort_keys=True)}"

    @abstractmethod
    def _begun(self) -> int:
        """Make it if it is not there; how many rows are written. On rank 0."""

    @abstractmethod
    def _open(self) -> None:
        """Get ready to write, on each rank."""

    @abstractmethod
    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        """Which rank writes what."""

    @abstractmethod
    def _put(self, box: Box, block: torch.Tensor) -> None:
        """Write this rank's block."""

    @abstractmethod
    def _note_rows(self, rows: int, boxes: list[Box | None]) -> None:
        """So many are written, the last by ranks with these boxes. On rank 0."""

    @abstractmethod
    def _complete(self) -> None:
        """All is written. On rank 0."""

    def write(self, begin: int, tensor: DistTensor) -> None:
        """Write the rows from ``begin`` on, behind those that are written; those behind them are to be written again.

        Collective.

        Raises
        ------
        DataError
            On all ranks, if they cannot be written, or do not fit.
        """
        with torch.no_grad():
            if begin > self.rows or tensor.shape[1:] != self.shape[1:] or begin + len(tensor) > self.shape[0]:
                raise DataError(
                    f"{self.path}: rows {begin} to {begin + len(tensor)} of {tuple(tensor.shape[1:])} do not fit "
                    f"behind {self.rows} rows of {self.shape}"
                )
            placed = tensor.redistribute(self._distribution(begin, tensor))
            box = placed.dist.box(None, placed.shape)
            box = (Interval(box[0].start + begin, box[0].stop + begin), *box[1:])
            alone = all(placed.grid.coords[a] == 0 for a in placed.grid.shape if a not in placed.dist.split_axes)
            mine = box if alone and placed.local.numel() else None
            block = placed.local.to("cpu", self.dtype).contiguous()
            try_on_all_ranks(self.comm, lambda: None if mine is None else self._put(mine, block), DataError)
        boxes = self.comm.gather(mine, root=0)
        self.rows = begin + len(tensor)

        def note() -> None:
            if boxes is not None:
                self._note_rows(self.rows, boxes)

        try_on_all_ranks(self.comm, note, DataError)

    def finish(self) -> None:
        """Say that it is complete. Collective.

        Raises
        ------
        DataError
            On all ranks, if rows are missing, or that cannot be written.
        """
        if self.rows < self.shape[0]:
            raise DataError(f"{self.path}: {self.rows} of {self.shape[0]} rows are written")
        try_on_all_ranks(self.comm, lambda: self._complete() if self.comm.rank == 0 else None, DataError)


class _Zarr(Output):
    """A zarr group, format 3; while it is written an attribute says so."""

    def _begun(self) -> int:
        zarr = _zarr(self.path)
        if self.path.exists():
            group = zarr.open_group(self.path, mode="r+")
            begun = group.attrs.get(UNFINISHED)
            if begun is None or (found := decoded(begun, _Begun, str(self.path), DataError)).whole != self.whole:
                raise DataError(f"{self.path} is there already; remove it, or name another")
            return found.rows
        group = zarr.open_group(self.path, mode="w-", attributes={UNFINISHED: {"rows": 0, "whole": self.whole}})
        dtype = str(self.note["dtype"])
        group.create_array(self.name, shape=self.shape, chunks=_chunks(self.shape), dtype=dtype)
        return 0

    def _open(self) -> None:
        self._array = _zarr(self.path).open_group(self.path, mode="r+")[self.name]

    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        axes, bounds = tensor.dist.split, {}
        offsets = (begin, *(0 for _ in self.shape[1:]))
        for axis, extent, chunk, offset in zip(axes, tensor.shape, self._array.chunks, offsets, strict=True):
            if axis is not None:
                bounds[axis] = aligned(extent, chunk, tensor.grid.shape[axis], offset)
        return Distribution(tensor.grid, axes, boundaries=bounds)

    def _put(self, box: Box, block: torch.Tensor) -> None:
        self._array[tuple(slice(i.start, i.stop) for i in box)] = block.numpy()

    def _note_rows(self, rows: int, boxes: list[Box | None]) -> None:
        group = _zarr(self.path).open_group(self.path, mode="r+")
        group.attrs[UNFINISHED] = {"rows": rows, "whole": self.whole}

    def _complete(self) -> None:
        group = _zarr(self.path).open_group(self.path, mode="r+")
        if UNFINISHED in group.attrs:
            del group.attrs[UNFINISHED]


class _Hdf5(Output):
    """Files of the ranks, and a virtual dataset over them, which is there when all are."""

    def _begun(self) -> int:
        if self.path.exists():
            raise DataError(f"{self.path} is there already; remove it, or name another")
        self._pieces: list[tuple[str, list[tuple[int, int]]]] = []
        _parts_of(self.path).mkdir(parents=True, exist_ok=True)
        begun = _progress(self.path)
        if begun is None:
            if next(_parts_of(self.path).iterdir(), None) is not None:
                raise DataError(f"{_parts_of(self.path)} holds other files; remove it, or name another output")
            self._note_rows(0, [])
            return 0
        if begun.whole != self.whole:
            raise DataError(
                f"{_parts_of(self.path)} holds another output that is not finished; remove it, or name another"
            )
        self._pieces = begun.pieces
        return begun.rows

    def _open(self) -> None:
        """Each write opens a file of its own."""

    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        return tensor.dist.balanced() if tensor.dist.cyclic else tensor.dist

    def _put(self, box: Box, block: torch.Tensor) -> None:
        with Folder(_parts_of(self.path)) as folder:
            folder.write(_file_name(box[0].start, self.comm.rank), hdf5_image({self.name: block}))

    def _note_rows(self, rows: int, boxes: list[Box | None]) -> None:
        begin = min((box[0].start for box in boxes if box is not None), default=rows)
        # What an earlier job wrote, but did not note as complete, is written anew.
        earlier = [(name, box) for name, box in self._pieces if box[0][0] < begin]
        self._pieces = [(name, [(box[0][0], min(box[0][1], begin)), *box[1:]]) for name, box in earlier]
        for rank, box in enumerate(boxes):
            if box is not None:
                self._pieces.append((_file_name(box[0].start, rank), [(i.start, i.stop) for i in box]))
        progress = {"rows": rows, "whole": self.whole, "pieces": self._pieces}
        write_file(_parts_of(self.path) / _PROGRESS, json.dumps(progress))

    def _complete(self) -> None:
        layout = h5py.VirtualLayout(self.shape, np.dtype(str(self.note["dtype"])))
        for name, box in self._pieces:
            shape = tuple(stop - start for start, stop in box)
            source = h5py.VirtualSource(f"{_parts_of(self.path).name}/{name}", self.name, shape=shape)
            layout[tuple(slice(*each) for each in box)] = source
        with h5py.File(str(self.path), "w", driver="core", backing_store=False) as file:
            file.create_virtual_dataset(self.name, layout)
            file.flush()
            image = file.id.get_file_image()
        write_file(self.path, image)
        with Folder(_parts_of(self.path)) as folder:
            folder.remove(_PROGRESS)


def aligned(extent: int, chunk: int, parts: int, offset: int = 0) -> tuple[int, ...]:
    """Boundaries of ``parts`` blocks of ``extent`` indices, which lie at ``offset``, on the borders of chunks.

    >>> aligned(10, 4, 2), aligned(10, 4, 4), aligned(4, 4, 2, offset=2)
    ((0, 8, 10), (0, 4, 8, 10, 10), (0, 2, 4))
    """
    if not extent:
        return (0,) * (parts + 1)
    first = offset // chunk
    count = (offset + extent - 1) // chunk + 1 - first
    begins = (block_range(count, parts, part).start for part in range(parts))
    return (*(min(max((first + begin) * chunk - offset, 0), extent) for begin in begins), extent)


def _chunks(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a new array: of one sample, and small enough for many ranks."""
    if len(shape) < 3:
        return tuple(max(1, min(extent, _ROWS)) for extent in shape)
    return (1, *(max(1, min(_LARGEST_CHUNK, -(-extent // 4) if extent > 32 else extent)) for extent in shape[1:]))


class _Begun(File):
    rows: int
    whole: str


class _Progress(_Begun):
    pieces: list[tuple[str, list[tuple[int, int]]]]


def _progress(path: Path) -> _Progress | None:
    """What is noted of an HDF5 output that is not finished; None if nothing is."""
    note = _parts_of(path) / _PROGRESS
    if not os.path.lexists(note):
        return None
    with open_regular(note, follow_links=False) as file:
        text = file.read().decode(errors="replace")
    return decoded(parsed_json(text, str(note), DataError), _Progress, str(note), DataError)


def _parts_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def _file_name(begin: int, rank: int) -> str:
    return f"row-{begin:09}-rank-{rank:05}.h5"


def _zarr(path: Path) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise DataError(f"{path}: zarr is not installed: pip install 'distconv[zarr]', or write NAME.h5") from error
    return zarr
