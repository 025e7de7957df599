"""Opening of samples of any format as a source: each rank reads the chunks that its boxes touch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks, try_on_rank_0
from distconv.data.address import Location, Url, parse_location
from distconv.data.formats.hdf5_files import ConcatenatedFiles, FileMetadata, Hdf5File, read_file_metadata
from distconv.data.formats.nifti import NiftiFile, is_nifti
from distconv.data.formats.npy import NpyFiles, has_npy_files
from distconv.data.formats.store import Store, check_inside
from distconv.data.formats.zarr_groups import ZarrGroup
from distconv.data.hdf5 import DatasetLayout, SampleDataset, SampleFile
from distconv.data.opened_file import open_hdf5, resolve_internal_link
from distconv.data.reading_processes import ReadByProcesses
from distconv.data.source import StoredSource
from distconv.errors import DataError
from distconv.whole_files import open_regular

AnyPath = str | os.PathLike[str] | Location

_SINGLE_PATH_TYPES = (str, os.PathLike, Url)
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
_NETCDF_SUFFIXES = (".nc", ".nc4", ".netcdf")
_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf")
_NPY_MAGIC, _HDF5_MAGIC = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n"
"""First bytes of .npy files, and of most HDF5 files."""


def open_source(
    path: AnyPath | Sequence[AnyPath],
    layouts: Mapping[str, DatasetLayout] | Sequence[str],
    comm: MPI.Intracomm | None = None,
    *,
    one_each: bool = False,
    readers: int = 1,
) -> StoredSource:
    """Open stored datasets of any supported format as a source for :class:`Loader`.

    The content of a file determines its format, not its name. Of a URL the suffix does: a URL with another suffix is a
    zarr group if it contains zarr's metadata, otherwise an HDF5 file. Values that attributes describe
    (``scale_factor``, ``_FillValue``) are decoded as xarray decodes them. Collective: call on every rank.

    Parameters
    ----------
    path : str, path-like, Url or sequence of these
        A zarr group; an HDF5 or netCDF 4 file, with virtual datasets, too; a folder of NumPy's .npy files, or one such
        file; a NIfTI volume, whose only dataset is ``image`` (N, C, X, Y, Z); or several HDF5, netCDF or NIfTI files or
        zarr groups: a list or a pattern (``samples/*.h5``), or a folder of files. Groups and files may be URLs that
        fsspec understands, ``s3://bucket/samples.zarr``.
    layouts : mapping of str to DatasetLayout, or sequence of str
        Names of the datasets; a mapping also gives the requirements on each.
    comm : MPI.Intracomm, optional
        Ranks that read. Default: all ranks of the job.
    one_each : bool
        True if each file of a list holds one sample, without a dimension that counts samples. Otherwise the samples of
        the files are concatenated. Not for NIfTI files, which have that dimension.
    readers : int
        Processes that read at a time on each rank. With 1 this process reads, in a thread.

    Returns
    -------
    StoredSource
        The open datasets. The caller closes it.

    Raises
    ------
    DataError
        On all ranks, if files are missing, incomplete or damaged, hold Python objects, or are links to other folders.
    MismatchError
        If ranks pass different files, or see different ones.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    layouts = [layouts] if isinstance(layouts, str) else layouts
    named = path if isinstance(path, _SINGLE_PATH_TYPES) else [str(each) for each in path]
    check_same_on_all_ranks(comm, "open_source", f"{sorted(layouts)} of {named}, {one_each}, {readers}")
    if not layouts:
        raise DataError(f"open_source: no datasets of {path} are named. Name at least one.")
    files = try_on_all_ranks(comm, lambda: list_files(path), DataError)
    opened: SampleDataset
    if files is not None:
        opened = _open_files(parse_location(display_path(path)), files, layouts, comm, one_each)
    else:
        place = parse_location(path)  # type: ignore[arg-type]  # a list has files
        kind = try_on_all_ranks(comm, lambda: detect_format(place), DataError)
        if kind is Hdf5File:
            opened = SampleFile(place, layouts, comm)
        else:
            opened = SampleDataset(place, layouts, comm, lambda names: kind(place, names))
    return opened if readers == 1 else ReadByProcesses(opened, readers)


def is_source_path(path: Path) -> bool:
    """Return True if a path is a pattern, a zarr group, a .npy or netCDF file, or a folder that contains .npy files.

    True for a NIfTI file, too. False for an HDF5 file and for any other folder, although :func:`open_source` also opens
    these.
    """
    if glob.has_magic(str(path)) and not path.exists():
        return True
    if path.is_dir():
        return any((path / name).is_file() for name in _ZARR_FILES) or has_npy_files(path)
    return path.suffix in (".npy", *_NETCDF_SUFFIXES) or is_nifti(path)


def has_group(path: Path, group: str, comm: MPI.Intracomm) -> bool:
    """Return True if rank 0 finds a group in a file or folder. Collective: call on every rank.

    A file that cannot be read counts as a file without the group. Opening it later raises the error.

    Parameters
    ----------
    path : Path
        An HDF5 file, or a folder.
    group : str
        Path of the group in the file, or of a folder below ``path``.
    comm : MPI.Intracomm
        The ranks.
    """

    def look() -> bool:
        if path.is_dir():
            return (path / group).is_dir()
        try:
            with open_hdf5(path)[0] as file:
                place = resolve_internal_link(file, group)
                return place is not None and isinstance(file[place], h5py.Group)
        except OSError:
            return False

    return try_on_rank_0(comm, look, DataError)


def detect_format(path: Location) -> type[Store]:
    """Return the store class for the content of one file or folder, or for the suffix of a URL or a missing file.

    Parameters
    ----------
    path : Path or Url
        Location of the samples.

    Returns
    -------
    type of Store

    Raises
    ------
    DataError
        If it is a folder without samples.
    """
    if isinstance(path, Url):
        if is_nifti(path):
            return NiftiFile
        if path.suffix not in (".npy", *_NETCDF_SUFFIXES, *_HDF5_SUFFIXES) and any(
            (path / name).is_file() for name in _ZARR_FILES
        ):
            return ZarrGroup
    elif path.is_dir():
        if any((path / name).is_file() for name in _ZARR_FILES):
            return ZarrGroup
        if has_npy_files(path):
            return NpyFiles
        raise DataError(f"{path} is a folder without a zarr group, .npy, HDF5 or NIfTI files. Name another.")
    elif path.is_file():
        with open_regular(path) as file:
            # By the content, not by the name. A URL is not opened for that.
            begin = file.read(len(_HDF5_MAGIC))
        if begin.startswith(_NPY_MAGIC):
            return NpyFiles
        return NiftiFile if is_nifti(path) and begin != _HDF5_MAGIC else Hdf5File
    if is_nifti(path):
        return NiftiFile
    return NpyFiles if path.suffix == ".npy" else Hdf5File


def display_path(path: AnyPath | Sequence[AnyPath]) -> str:
    """Return the name of samples in errors: the path, or for a list its common folder or its first URL.

    Parameters
    ----------
    path : str, path-like, Url or sequence of these
        As in :func:`open_source`.

    Returns
    -------
    str
    """
    if isinstance(path, _SINGLE_PATH_TYPES):
        return str(path)
    places = [parse_location(each).absolute() for each in path]
    if any(isinstance(each, Url) for each in places):
        return f"{places[0]} and {len(places) - 1} others"
    return os.path.commonpath([str(each) for each in places])


def list_files(path: AnyPath | Sequence[AnyPath]) -> Sequence[Location] | None:
    """Return the files of a list, of a pattern, or of a folder of HDF5, netCDF and NIfTI files.

    None if ``path`` is one file or group, a URL, or a folder without such files.

    Parameters
    ----------
    path : str, path-like, Url or sequence of these
        As in :func:`open_source`.

    Returns
    -------
    sequence of Path or Url, or None

    Raises
    ------
    DataError
        If there are none, or one leads out of its folder.
    """
    if not isinstance(path, _SINGLE_PATH_TYPES):
        if not path:
            raise DataError("open_source: the list of files is empty; name at least one")
        return [parse_location(each) for each in path]
    text, place = str(path), parse_location(path)
    if isinstance(place, Url):
        if "*" in text:
            raise DataError(f"{text}: patterns are not supported in URLs. Give a list of the files' URLs.")
        return None
    if place.is_dir():
        suffixes = _HDF5_SUFFIXES + _NETCDF_SUFFIXES
        files = sorted(each for each in place.iterdir() if each.suffix in suffixes or is_nifti(each))
        folder = place
    # A file whose name contains such characters is not a pattern.
    elif glob.has_magic(text) and not place.exists():
        folder, pattern = _split_pattern(place)
        files = sorted(folder / each for each in glob.glob(pattern, root_dir=folder, recursive=True))
        if not files:
            raise DataError(f"{text}: no file matches the pattern. Correct it.")
    else:
        return None
    for each in files:
        check_inside(each, folder, f"{text}: {each.name}", folders=True)
    return files or None


def _split_pattern(path: Path) -> tuple[Path, str]:
    """Return the folder in which a pattern begins, and the rest.

    A component with wildcard characters is not part of the pattern if a folder has this very name.
    """
    folder, parts = Path(path.anchor), list(path.parts[1:] if path.anchor else path.parts)
    while len(parts) > 1 and (not glob.has_magic(parts[0]) or (folder / parts[0]).is_dir()):
        folder /= parts.pop(0)
    return folder, str(Path(*parts))


def _open_files(
    path: Location,
    files: Sequence[Location],
    layouts: Mapping[str, DatasetLayout] | Sequence[str],
    comm: MPI.Intracomm,
    one_each: bool,
) -> SampleDataset:
    """Open a list of files. Each rank reads the metadata of every P-th file, and all ranks gather them. Collective."""
    # The assignment to ranks follows from the list, so it must be the same on all of them.
    check_same_on_all_ranks(comm, f"{path}: the files", str([str(each) for each in files]))

    def metadata(file: Location) -> FileMetadata:
        kind = detect_format(file)
        if one_each and kind is NiftiFile:
            raise DataError(f"{file}: one_each=True, but a NIfTI file always holds one sample. Leave one_each out.")
        return read_file_metadata(file, list(layouts), one_each, kind)

    mine = try_on_all_ranks(comm, lambda: [metadata(each) for each in files[comm.rank :: comm.size]], DataError)
    heads_of_ranks = comm.allgather(mine)
    # Rank r has read the files r, r + P, r + 2 P, ...
    heads = [heads_of_ranks[index % comm.size][index // comm.size] for index in range(len(files))]
    return SampleDataset(path, layouts, comm, lambda names: ConcatenatedFiles(path, names, heads, one_each))
