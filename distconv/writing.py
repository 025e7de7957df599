"""Writing distributed tensors to files: each rank writes its own block, and nothing is gathered.

``.zarr`` is a zarr group. Ranks first redistribute rows at the borders of their blocks, so that each chunk has a single
writer. ``.h5`` and ``.nc`` are virtual datasets over one file of each rank in the folder ``NAME.h5.parts``, so that
HDF5 needs no MPI support. ``.nii.gz`` and ``.nii`` are NIfTI volumes (:mod:`distconv.volume_files`). An unfinished
output is marked as such, and a later run resumes it. Dimensions, coordinates and attributes are stored as xarray and
netCDF read them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from mpi4py import MPI

from distconv.checkpoint.files import hdf5_image
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.coordinates import VariableLabels, to_labels
from distconv.data.formats.hdf5_files import NO_VARIABLE
from distconv.data.formats.nifti import is_nifti
from distconv.data.formats.zarr_groups import UNFINISHED
from distconv.distribution import Box, Distribution, block_range
from distconv.errors import DataError
from distconv.output import PROGRESS, Output, OutputState, PartsOutput, read_progress
from distconv.precision import HALF
from distconv.tensor import DistTensor
from distconv.text_files import decode
from distconv.volume_files import NiftiOutput, check_volumes
from distconv.whole_files import Folder, write_file

_LARGEST_CHUNK = 128
"""Largest size of a chunk along channels and space."""
_ROWS = 1024
"""Rows of a chunk of arrays with fewer than three dimensions."""
_LARGEST_ATTRIBUTE = 8000
"""Numbers in an attribute: 64 KiB in HDF5."""


def write(
    tensor: DistTensor | Mapping[str, DistTensor],
    path: str | os.PathLike[str],
    name: str = "values",
    *,
    dims: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> None:
    """Write a distributed tensor, or several, to a new file.

    Each rank writes its own block. An unfinished output of the same shape is overwritten.

    Collective: call on every rank.

    Parameters
    ----------
    tensor : DistTensor or mapping of str to DistTensor
        Real values. Half precision is written as float32. Each tensor of a mapping becomes a dataset with its name.
    path : str or path-like
        A zarr group, ``NAME.zarr``, an HDF5 file, ``NAME.h5``, a netCDF 4 file, ``NAME.nc``, or a NIfTI volume,
        ``NAME.nii.gz`` or ``NAME.nii``, of one sample (1, C, X, Y, Z) or (1, X, Y, Z). It must not exist.
    name : str
        The name of the dataset, if there is one tensor.
    dims : sequence of str, optional
        Name of each dimension, ``("time", "lat", "lon")``, by which xarray opens the file. For tensors with different
        dimensions, a mapping from tensor names to these.
    coords : mapping of str to array, optional
        Values along dimensions: numbers, dates, or coordinates of :func:`open_gridded`, which keep their units and
        calendar.
    attrs : mapping of str to object, optional
        Attributes of the dataset, such as its units: strings, numbers, and arrays of numbers, which are stored row by
        row. For several tensors, a mapping from tensor names to these. Of a NIfTI volume, ``affine`` (4, 4),
        ``affine_code`` and ``space_units``.

    Raises
    ------
    DataError
        On every rank, if a tensor is not distributed or has no dimensions, the path exists, its suffix or the dtype
        is not supported, ``dims``, ``coords`` or ``attrs`` do not fit, or the file cannot be written.
    MismatchError
        On every rank, if ranks pass different arguments.

    Examples
    --------
    >>> dc.write(model(x), "result.h5")   # doctest: +SKIP
    >>> dc.write(y, "out.zarr", "t2m", dims=("time", "lat", "lon"), coords={"lat": lat})   # doctest: +SKIP
    """
    several = isinstance(tensor, Mapping)
    tensors: Mapping[str, DistTensor] = tensor if isinstance(tensor, Mapping) else {name: tensor}
    for value in tensors.values():
        if not isinstance(value, DistTensor):
            raise DataError(
                f"write: a {type(value).__name__} is not distributed. Pass a distributed tensor, dc.scatter(x, grid), "
                "or write the tensor on one rank."
            )
    if not tensors:
        raise DataError(f"write: {path}: there are no tensors")
    world = next(iter(tensors.values())).grid.world
    attributes: Mapping[str, Any] = (attrs or {}) if several else {name: attrs}
    dims_by_name = dims if isinstance(dims, Mapping) else dict.fromkeys(tensors, dims)
    if Path(path).suffix == ".nc":  # netCDF has no dimensions without names
        dims_by_name = {n: dims_by_name.get(n) or [f"{n}_dim_{i}" for i in range(x.dim())] for n, x in tensors.items()}
    shapes = {n: tuple(x.shape) for n, x in tensors.items()}
    labels = try_on_all_ranks(
        world, lambda: to_labels(shapes, dims_by_name, coords, attributes, f"write: {path}"), DataError
    )
    datasets = [
        [n, list(x.shape), str(_stored_dtype(x.dtype)).removeprefix("torch."), labels[n].dims, labels[n].attributes]
        for n, x in tensors.items()
    ]
    check_same_on_all_ranks(world, f"write {path}", f"{datasets}")
    note = {"datasets": datasets} if several else {}
    for each, x in tensors.items():
        output = open_output(path, each, tuple(x.shape), x.dtype, world, note=note, labels=labels[each])
        output.write(0, x)
    # The last one completes the file.
    output.finish()


def open_output(
    path: str | os.PathLike[str],
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    comm: MPI.Intracomm,
    *,
    note: Mapping[str, Any],
    labels: VariableLabels | None = None,
) -> Output:
    """Open a new dataset, or resume an unfinished one with the same ``note``.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    path : str or path-like
        A zarr group, ``NAME.zarr``, an HDF5 file, ``NAME.h5``, a netCDF 4 file, ``NAME.nc``, or a NIfTI volume,
        ``NAME.nii.gz`` or ``NAME.nii``.
    name : str
        The name of the dataset.
    shape : sequence of int
        Its global shape; dimension 0 counts rows, such as samples.
    dtype : torch.dtype
        The dtype of the tensors. Half precision is written as float32.
    comm : MPI.Intracomm
        The ranks that write.
    note : mapping of str to object
        Describes the content, in JSON types. An unfinished output is resumed only if it is the same. With ``files``, a
        list of the names of NIfTI files, the output is the folder ``path`` with a file for each row.
    labels : VariableLabels, optional
        Dimensions, coordinates and attributes.

    Returns
    -------
    Output

    Raises
    ------
    DataError
        On every rank, if the path contains something else, its suffix or the dtype is not supported, or it cannot be
        written.
    MismatchError
        On every rank, if ranks pass different arguments.
    """
    place = Path(path)
    labels = labels or VariableLabels()
    described = {"shape": list(shape), "dtype": str(dtype).removeprefix("torch."), **labels.description, **note}
    check_same_on_all_ranks(comm, f"output {place}", f"{name}, {json.dumps(described, sort_keys=True)}")
    if not shape:
        raise DataError(f"write: {place}: a single number has no rows. Write x.reshape(1), or print it.")
    if not isinstance(name, str) or not name.strip("/"):
        raise DataError(f"write: {place}: {name!r} is not a valid dataset name. Pass a name that is not empty.")
    kinds: dict[str, type[Output]] = {".zarr": _ZarrOutput, ".h5": _Hdf5Output, ".nc": _Hdf5Output}
    kind = NiftiOutput if is_nifti(place) or "files" in note else kinds.get(place.suffix)
    if kind is None:
        raise DataError(
            f"write: {place}: unknown output format. Name a zarr group, NAME.zarr, an HDF5 file, NAME.h5, a netCDF "
            "file, NAME.nc, or a NIfTI volume, NAME.nii.gz."
        )
    if kind is NiftiOutput:
        # nibabel may be missing on one rank alone.
        try_on_all_ranks(comm, lambda: check_volumes(place, shape, labels, note), DataError)
    if kind is _Hdf5Output and ("%" in place.name or place.name != os.fsencode(place.name).decode(errors="replace")):
        raise DataError(
            f"write: {place}: HDF5 cannot open parts whose names contain % or are not UTF-8. Choose another name."
        )
    for key, value in labels.attributes.items() if kind is _Hdf5Output else ():
        if isinstance(value, list) and len(value) > _LARGEST_ATTRIBUTE:
            raise DataError(
                f"write: {place}: attribute {key!r} has {len(value)} numbers, but HDF5 stores at most "
                f"{_LARGEST_ATTRIBUTE}. Write NAME.zarr."
            )
    dtype = _stored_dtype(dtype)
    if dtype.is_complex or not hasattr(np, str(dtype).removeprefix("torch.")):
        raise DataError(f"write: {place}: {dtype} is not a real NumPy dtype. Convert the tensor.")
    described["dtype"] = str(dtype).removeprefix("torch.")
    return kind(place.absolute(), name, tuple(shape), dtype=dtype, comm=comm, note=described, labels=labels)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    # NumPy has no bfloat16. float32 holds all values of both half-precision dtypes.
    return torch.float32 if dtype in HALF else dtype


def count_written_rows(path: Path, comm: MPI.Intracomm) -> int:
    """Return the number of rows in an unfinished output; 0 if there is no output.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    path : Path
        Path of the output.
    comm : MPI.Intracomm
        Communicator of all ranks that call.

    Returns
    -------
    int

    Raises
    ------
    DataError
        On every rank, if the path contains something else.
    """

    def read_rows() -> int:
        if not path.exists():
            progress = read_progress(path)
            return progress.rows if progress else 0
        begun = _zarr(path).open_group(path, mode="r").attrs.get(UNFINISHED) if path.suffix == ".zarr" else None
        if begun is None:
            raise DataError(f"{path} already exists. Remove it, or choose another name.")
        return decode(begun, OutputState, f"{path}: {UNFINISHED}", DataError).rows

    return try_on_rank_0(comm, read_rows, DataError)


class _ZarrOutput(Output):
    """A zarr group, format 3, with an attribute while it is unfinished."""

    def _begin_or_resume(self) -> int:
        zarr = _zarr(self.path)
        if self.path.exists():
            group = zarr.open_group(self.path, mode="r+")
            begun = group.attrs.get(UNFINISHED)
            if (
                begun is None
                or (found := decode(begun, OutputState, str(self.path), DataError)).whole != self.signature
            ):
                raise DataError(f"{self.path} already exists. Remove it, or choose another name.")
            if self.name in group:
                return found.rows
        else:
            group = zarr.open_group(self.path, mode="w-", attributes={UNFINISHED: {"rows": 0, "whole": self.signature}})
        group.create_array(
            self.name,
            shape=self.shape,
            chunks=_chunks(self.shape),
            dtype=str(self.note["dtype"]),
            dimension_names=self.labels.dims,
            attributes=dict(self.labels.attributes),
        )
        for name, each in self.labels.coords.items():
            if name not in group:
                stored = group.create_array(
                    name,
                    shape=each.values.shape,
                    chunks=each.values.shape,
                    dtype=each.values.dtype,
                    dimension_names=each.dims,
                    attributes=dict(each.attributes),
                )
                stored[:] = each.values
        return 0

    def _open(self) -> None:
        self._array = _zarr(self.path).open_group(self.path, mode="r+")[self.name]

    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        axes, bounds = tensor.dist.split, {}
        offsets = (begin, *(0 for _ in self.shape[1:]))
        for axis, extent, chunk, offset in zip(axes, tensor.shape, self._array.chunks, offsets, strict=True):
            if axis is not None:
                bounds[axis] = chunk_aligned_bounds(extent, chunk, tensor.grid.shape[axis], offset)
        return Distribution(tensor.grid, axes, boundaries=bounds)

    def _write_block(self, box: Box, block: torch.Tensor) -> None:
        self._array[tuple(slice(i.start, i.stop) for i in box)] = block.numpy()

    def _record_rows(self, rows: int, boxes: list[Box | None]) -> None:
        group = _zarr(self.path).open_group(self.path, mode="r+")
        group.attrs[UNFINISHED] = {"rows": rows, "whole": self.signature}

    def _finalize(self) -> None:
        zarr = _zarr(self.path)
        group = zarr.open_group(self.path, mode="r+")
        if UNFINISHED in group.attrs:
            del group.attrs[UNFINISHED]
        with warnings.catch_warnings():
            # zarr warns that format 3 does not define this yet. xarray looks for it, and warns if it is missing.
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(group.store)


class _Hdf5Output(PartsOutput):
    """Files of the ranks, and a virtual dataset over them, which is made at the end."""

    def _distribution(self, begin: int, tensor: DistTensor) -> Distribution:
        return tensor.dist.balanced() if tensor.dist.cyclic else tensor.dist

    def _write_block(self, box: Box, block: torch.Tensor) -> None:
        with Folder(self._parts) as folder:
            folder.write(self._file_name(box[0].start, self.comm.rank), hdf5_image({self.name: block}))

    def _file_name(self, begin: int, rank: int) -> str:
        # Datasets that are written together have files of their own.
        names = [dataset[0] for dataset in self.note.get("datasets", [])]
        number = f"-dataset-{names.index(self.name)}" if names else ""
        return f"row-{begin:09}-rank-{rank:05}{number}.h5"

    def _record_rows(self, rows: int, boxes: list[Box | None]) -> None:
        # Rows from here on are written again, and their earlier boxes are cut off.
        begin = min((box[0].start for box in boxes if box is not None), default=rows)
        # Files of an earlier job after the recorded rows may be incomplete, and are overwritten.
        earlier = [(file, name, box) for file, name, box in self._pieces if name == self.name and box[0][0] < begin]
        self._pieces = [each for each in self._pieces if each[1] != self.name]
        self._pieces += [(file, name, [(b[0][0], min(b[0][1], begin)), *b[1:]]) for file, name, b in earlier]
        for rank, box in enumerate(boxes):
            if box is not None:
                file = self._file_name(box[0].start, rank)
                self._pieces.append((file, self.name, [(i.start, i.stop) for i in box]))
        self._write_progress(rows)

    def _finalize(self) -> None:
        single = [self.name, self.shape, str(self.note["dtype"]), self.labels.dims, self.labels.attributes]
        datasets = self.note.get("datasets") or [single]
        # In memory, so that the file appears complete at once, and not while HDF5 writes it.
        with h5py.File(str(self.path), "w", driver="core", backing_store=False) as file:
            for name, shape, dtype, dims, attributes in datasets:
                layout = h5py.VirtualLayout(tuple(shape), np.dtype(dtype))
                for part, dataset, box in self._pieces:
                    if dataset == name:
                        extents = tuple(stop - start for start, stop in box)
                        source = h5py.VirtualSource(f"{self._parts.name}/{part}", name, shape=extents)
                        layout[tuple(slice(*each) for each in box)] = source
                file.create_virtual_dataset(name, layout)
                self._label(file, file[name], dims or ())
                file[name].attrs.update(attributes)
            file.flush()
            image = file.id.get_file_image()
        write_file(self.path, image)
        # Last of all: until the file exists, this note makes the parts an output that can be resumed.
        with Folder(self._parts) as folder:
            folder.remove(PROGRESS)

    def _label(self, file: h5py.File, dataset: h5py.Dataset, dims: Sequence[str]) -> None:
        """Store the names of dimensions, as netCDF does in HDF5, and their coordinates."""
        for axis, dim in enumerate(dims):
            coordinate = self.labels.coords.get(dim)
            if dim in file:
                scale = file[dim]
            elif coordinate is None:
                scale = file.create_dataset(dim, shape=(dataset.shape[axis],), dtype=">f4")
                scale.make_scale(f"{NO_VARIABLE}{dataset.shape[axis]:10d}")
            else:
                scale = file.create_dataset(dim, data=coordinate.values)
                scale.make_scale(dim)
                scale.attrs.update(coordinate.attributes)
            dataset.dims[axis].attach_scale(scale)


def chunk_aligned_bounds(extent: int, chunk: int, parts: int, offset: int = 0) -> tuple[int, ...]:
    """Return the boundaries of blocks that begin at chunk borders.

    Parameters
    ----------
    extent : int
        Number of indices.
    chunk : int
        Size of a chunk.
    parts : int
        Number of blocks.
    offset : int
        Position of the first index in the array of chunks.

    Returns
    -------
    tuple of int
        ``parts + 1`` boundaries, for ``Distribution(boundaries=...)``.

    Examples
    --------
    >>> chunk_aligned_bounds(10, 4, 2), chunk_aligned_bounds(10, 4, 4), chunk_aligned_bounds(4, 4, 2, offset=2)
    ((0, 8, 10), (0, 4, 8, 10, 10), (0, 2, 4))
    """
    if not extent:
        return (0,) * (parts + 1)
    # Chunk borders count from the first row of the file. This tensor begins at row `offset` of it.
    first = offset // chunk
    count = (offset + extent - 1) // chunk + 1 - first
    begins = (block_range(count, parts, part).start for part in range(parts))
    return (*(min(max((first + begin) * chunk - offset, 0), extent) for begin in begins), extent)


def _chunks(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the chunk shape of a new array: one sample, split into parts small enough for many ranks."""
    if len(shape) < 3:
        return tuple(max(1, min(extent, _ROWS)) for extent in shape)
    return (1, *(max(1, min(_LARGEST_CHUNK, -(-extent // 4) if extent > 32 else extent)) for extent in shape[1:]))


def _zarr(path: Path) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise DataError(f"{path}: zarr is not installed: pip install 'distconv[zarr]', or write NAME.h5") from error
    return zarr
