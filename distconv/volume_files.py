"""NIfTI volumes as outputs: no rank holds a full volume, and no two ranks write one file.

In a NIfTI file the first index changes fastest, so consecutive indices of the last dimension are consecutive bytes::

    1  ranks redistribute the volume: each has some indices of z, for all channels
    2  each rank writes its part of each channel to a file of its own, compressed
    3  rank 0 concatenates header and parts: the members of a .gz file are decompressed one after another
    4  at the end, the folder of the volumes, or the only volume, gets its name
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distconv.data.coordinates import AFFINE, AFFINE_CODE, SPACE_ATTRIBUTES, SPACE_UNITS, VariableLabels
from distconv.data.formats.nifti import import_nibabel, is_nifti_compressed
from distconv.distribution import Box, Distribution
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.output import PROGRESS, PartsOutput
from distconv.tensor import DistTensor
from distconv.whole_files import Folder, open_regular

_LARGEST_EXTENT = 32767
"""Largest size of a dimension in NIfTI-1. NIfTI-2 permits larger ones."""
_ALIGNED = 2
"""NIfTI's code of a matrix of unknown origin."""


def check_volumes(path: Path, shape: Sequence[int], labels: VariableLabels, note: Mapping[str, Any]) -> None:
    """Check that rows can be written as NIfTI volumes.

    Parameters
    ----------
    path : Path
        Path of the output.
    shape : sequence of int
        Shape (N, [C,] X, Y, Z).
    labels : VariableLabels
        Labels of the tensor.
    note : mapping of str to object
        As in :func:`distconv.writing.open_output`.

    Raises
    ------
    DataError
        If nibabel is not installed, the shape is not that of volumes, there is more than one and only one file, or the
        labels contain more than attributes of space.
    """
    import_nibabel(path)
    files = note.get("files", [path.name])
    if "datasets" in note or len(shape) not in (4, 5) or 0 in shape or len(files) != shape[0]:
        raise DataError(
            f"write: {path}: a NIfTI volume is one sample (1, C, X, Y, Z) or (1, X, Y, Z), not {tuple(shape)}. Write "
            "each sample to a file of its own, x[i : i + 1]."
        )
    other = sorted(set(labels.attributes) - set(SPACE_ATTRIBUTES))
    if labels.dims or other:
        what = f"attribute {other[0]!r}" if other else "names of dimensions or coordinates"
        raise DataError(
            f"write: {path}: a NIfTI file stores no {what}. Its attributes are {', '.join(SPACE_ATTRIBUTES)}."
        )
    numbers = labels.attributes.get(AFFINE, [0] * 16)
    if not isinstance(numbers, list) or len(numbers) not in (16, 16 * shape[0]):
        raise DataError(f"write: {path}: attribute {AFFINE!r} is {numbers}. Give a matrix (4, 4).")


class NiftiOutput(PartsOutput):
    """A NIfTI volume for each row: the file ``path``, or those of a folder that the note names."""

    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        if not hasattr(self, "_slabs"):
            self._slabs = ProcessGrid(self.comm, w=self.comm.size)
        return Distribution(self._slabs, (*(None for _ in self.shape[1:]), "w"))  # [1]

    def _write_block(self, box: Box, block: torch.Tensor) -> None:
        values = block.numpy().reshape(block.shape[0], self._channels, *block.shape[-3:])
        with Folder(self._parts) as folder:
            for row, channels in enumerate(values, start=box[0].start):
                for channel, part in enumerate(channels):
                    name = _part_name(row, channel, box[-1].start)
                    folder.write(name, [memoryview(self._encoded(part.tobytes("F")))])  # [2]

    def _encoded(self, content: bytes) -> bytes:
        # The fastest level, as nibabel's. Without a time, so that equal volumes have equal files.
        is_compressed = is_nifti_compressed(Path(self._files[0]))
        return gzip.compress(content, 1, mtime=0) if is_compressed else content

    @property
    def _files(self) -> list[str]:
        files: list[str] = self.note.get("files", [self.path.name])
        return files

    @property
    def _channels(self) -> int:
        return self.shape[1] if len(self.shape) == 5 else 1

    def _record_rows(self, rows: int, boxes: list[Box | None]) -> None:
        written = [box for box in boxes if box is not None]
        begins = sorted(box[-1].start for box in written)
        with Folder(self._parts) as folder:
            for row in range(written[0][0].start, rows) if written else ():
                names = [_part_name(row, channel, begin) for channel in range(self._channels) for begin in begins]
                folder.write(self._files[row], self._content(row, names))  # [3]
                for name in names:
                    folder.remove(name)
        self._write_progress(rows)

    def _content(self, row: int, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the header of a volume, and its parts, of which one is in memory at a time."""
        yield memoryview(self._encoded(self._header(row)))
        for name in names:
            with open_regular(self._parts / name, follow_links=False) as file:
                content = file.read()
            yield memoryview(content)

    def _header(self, row: int) -> bytes:
        """Return the bytes of a file before its values."""
        nibabel = import_nibabel(self.path)
        given = self.labels.attributes
        matrices = np.reshape(given[AFFINE], (-1, 4, 4)) if AFFINE in given else None
        affine = None if matrices is None else matrices[row if len(matrices) > 1 else 0]
        extents = (*self.shape[-3:], *((self._channels,) if self._channels > 1 else ()))
        kind = nibabel.Nifti2Image if max(extents) > _LARGEST_EXTENT else nibabel.Nifti1Image
        dtype = np.dtype(self.note["dtype"])
        try:
            # The values are not read. This array takes no memory.
            image = kind(np.broadcast_to(np.zeros((), dtype), extents), affine, dtype=dtype)
        except Exception as error:  # of nibabel
            raise DataError(f"{self.path}: {error}. Convert the tensor.") from error
        if affine is not None:
            code = given.get(AFFINE_CODE) or _ALIGNED
            image.set_sform(affine, code)
            image.set_qform(affine, code)
            # A qform, which is stored in single precision, cannot represent a shear.
            if not np.allclose(image.get_qform(), affine, rtol=0, atol=1e-5 * np.abs(affine).max()):
                image.set_qform(None, 0)
        image.header.set_xyzt_units(given.get(SPACE_UNITS, "unknown"))
        image.header.set_data_offset(image.header.single_vox_offset)
        content: bytes = image.header.binaryblock
        return content.ljust(image.header.single_vox_offset, b"\0")

    def _finalize(self) -> None:
        # The note is removed last: until the output has its name, it can be resumed.
        if "files" in self.note:
            self._parts.rename(self.path)  # [4]
            (self.path / PROGRESS).unlink()
        else:
            (self._parts / self.path.name).rename(self.path)
            (self._parts / PROGRESS).unlink()
            self._parts.rmdir()


def _part_name(row: int, channel: int, begin: int) -> str:
    return f"row-{row:09}-channel-{channel:05}-z-{begin:09}.part"
