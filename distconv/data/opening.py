"""Samples of whatever format a path has, opened as a source: each rank reads the chunks that its boxes touch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.address import Address, Place, place_of
from distconv.data.formats.hdf5_files import Hdf5File, Hdf5Files, head_of
from distconv.data.formats.npy import NpyFiles, is_npy
from distconv.data.formats.store import Store, check_inside
from distconv.data.formats.zarr_groups import ZarrGroup
from distconv.data.hdf5 import Layout, SampleFile, StoredSamples
from distconv.data.opened_file import opened, own_place
from distconv.data.reading_processes import ReadByProcesses
from distconv.data.source import StoredSource
from distconv.errors import DataError
from distconv.whole_files import open_regular

AnyPath = str | os.PathLike[str] | Place

_ONE = (str, os.PathLike, Address)
_ZARR = ("zarr.json", ".zgroup", ".zarray")
_NETCDF = (".nc", ".nc4", ".netcdf")
_HDF5 = (".h5", ".hdf5", ".hdf")
_NPY = b"\x93NUMPY"
"""How a .npy file begins."""


def open_source(
    path: AnyPath | Sequence[AnyPath],
    layouts: Mapping[str, Layout] | Sequence[str],
    comm: MPI.Intracomm | None = None,
    *,
    one_each: bool = False,
    readers: int = 1,
) -> StoredSource:
    """The datasets ``layouts`` of ``path``, as a source for :class:`Loader`. Collective.

    ``path`` is a zarr group, an HDF5 or netCDF 4 file, virtual datasets among them, a folder of NumPy's .npy files or
    one such file; or a list, a pattern (``samples/*.h5``) or a folder of HDF5 or netCDF files, which have samples each,
    or ``one_each``: datasets without the dimension that counts them. Groups and files may be addresses that fsspec
    understands, ``s3://bucket/samples.zarr``. The content decides of which format a file is, not its name. Values that
    attributes describe (``scale_factor``, ``_FillValue``) are decoded as xarray decodes them. ``layouts`` names the
    datasets; as a mapping it says what each must be too. ``readers``: processes that read at a time, besides this one.

    Raises
    ------
    DataError
        On all ranks, if files are missing, incomplete, damaged, lead elsewhere, or hold Python's objects.
    MismatchError
        If ranks ask for different files, or see different ones.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    layouts = [layouts] if isinstance(layouts, str) else layouts
    named = path if isinstance(path, _ONE) else [str(each) for each in path]
    check_same_on_all_ranks(comm, "open_source", f"{sorted(layouts)} of {named}, {one_each}, {readers}")
    if not layouts:
        raise DataError(f"open_source: no datasets of {path} are named. Name at least one.")
    files = try_on_all_ranks(comm, lambda: _files_of(path), DataError)
    opened: StoredSamples
    if files is not None:
        opened = _files(place_of(_name_of(path)), files, layouts, comm, one_each)
    else:
        place = place_of(path)  # type: ignore[arg-type]  # a list has files
        kind = try_on_all_ranks(comm, lambda: _kind_of(place), DataError)
        opened = SampleFile(place, layouts, comm) if kind is Hdf5File else _store(kind, place, layouts, comm)
    return opened if readers == 1 else ReadByProcesses(opened, readers)


def is_source(path: Path) -> bool:
    """Whether a path is a pattern, or of a format that is no single HDF5 file."""
    if glob.has_magic(str(path)) and not path.exists():
        return True
    if path.is_dir():
        return any((path / name).is_file() for name in _ZARR) or is_npy(path)
    return path.suffix in (".npy", *_NETCDF)


def has_group(path: Path, group: str, comm: MPI.Intracomm) -> bool:
    """Whether rank 0 finds such a group in what is stored; what is wrong with it, opening it will say. Collective."""

    def look() -> bool:
        if path.is_dir():
            return (path / group).is_dir()
        try:
            with opened(path)[0] as file:
                place = own_place(file, group)
                return place is not None and isinstance(file[place], h5py.Group)
        except OSError:
            return False

    return try_on_rank_0(comm, look, DataError)


def _store(
    kind: type[Store], path: Place, layouts: Mapping[str, Layout] | Sequence[str], comm: MPI.Intracomm
) -> StoredSamples:
    return StoredSamples(path, layouts, comm, lambda names: kind(path, names))


def _kind_of(path: Place) -> type[Store]:
    """Return the format of what is no list, by its content."""
    if isinstance(path, Address):
        if path.suffix not in (".npy", *_NETCDF, *_HDF5) and any((path / name).is_file() for name in _ZARR):
            return ZarrGroup
    elif path.is_dir():
        if any((path / name).is_file() for name in _ZARR):
            return ZarrGroup
        if is_npy(path):
            return NpyFiles
        raise DataError(f"{path} is a folder, but has no zarr group, no .npy files and no HDF5 files in it")
    elif path.is_file():
        with open_regular(path) as file:
            return NpyFiles if file.read(len(_NPY)) == _NPY else Hdf5File
    return NpyFiles if path.suffix == ".npy" else Hdf5File


def _name_of(path: AnyPath | Sequence[AnyPath]) -> str:
    if isinstance(path, _ONE):
        return str(path)
    places = [place_of(each).absolute() for each in path]
    if any(isinstance(each, Address) for each in places):
        return f"{places[0]} and {len(places) - 1} others"
    return os.path.commonpath([str(each) for each in places])


def _files_of(path: AnyPath | Sequence[AnyPath]) -> Sequence[Place] | None:
    """The HDF5 files of a list, a pattern or a folder, or None if it is none of them."""
    if not isinstance(path, _ONE):
        if not path:
            raise DataError("open_source: the list of files is empty; name at least one")
        return [place_of(each) for each in path]
    text, place = str(path), place_of(path)
    if isinstance(place, Address):
        if "*" in text:
            raise DataError(f"{text}: an address is no pattern; give a list of the files'")
        return None
    if place.is_dir():
        files = sorted(each for each in place.iterdir() if each.suffix in _HDF5 + _NETCDF)
        folder = place
    elif glob.has_magic(text) and not place.exists():
        folder, pattern = _split_pattern(place)
        files = sorted(folder / each for each in glob.glob(pattern, root_dir=folder, recursive=True))
        if not files:
            raise DataError(f"{text}: no file is called so")
    else:
        return None
    for each in files:
        check_inside(each, folder, f"{text}: {each.name}", folders=True)
    return files or None


def _split_pattern(path: Path) -> tuple[Path, str]:
    """Return the folder in which a pattern begins, and the pattern: what exists as it is written is no pattern."""
    folder, parts = Path(path.anchor), list(path.parts[1:] if path.anchor else path.parts)
    while len(parts) > 1 and (not glob.has_magic(parts[0]) or (folder / parts[0]).is_dir()):
        folder /= parts.pop(0)
    return folder, str(Path(*parts))


def _files(
    path: Place,
    files: Sequence[Place],
    layouts: Mapping[str, Layout] | Sequence[str],
    comm: MPI.Intracomm,
    one_each: bool,
) -> StoredSamples:
    """A list: the ranks share the looking at its files."""
    check_same_on_all_ranks(comm, f"{path}: the files", str([str(each) for each in files]))
    mine = try_on_all_ranks(
        comm,
        lambda: [head_of(each, list(layouts), one_each, _kind_of(each)) for each in files[comm.rank :: comm.size]],
        DataError,
    )
    heads_of_ranks = comm.allgather(mine)
    heads = [heads_of_ranks[index % comm.size][index // comm.size] for index in range(len(files))]
    return StoredSamples(path, layouts, comm, lambda names: Hdf5Files(path, names, heads, one_each))
