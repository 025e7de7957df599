"""HDF5 virtual datasets: their sources must lie in the folder of the file, and cover the dataset.

HDF5 returns fill values where a source is missing, and opens whatever path a file names. So all sources are checked
before HDF5 reads any.
"""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np

from distconv.data.formats.decoding import decoding_attributes
from distconv.data.formats.store import check_inside
from distconv.data.opened_file import open_dataset, open_hdf5
from distconv.errors import DataError

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def check_virtual_sources(virtual: h5py.Dataset, path: Path, name: str) -> dict[Path, tuple[int, ...] | None]:
    """Check the sources of a virtual dataset and return their chunks.

    Values are counted, and sources are compared by the bounds of their values. So each source must fill a range of
    indices: interleaved sources, such as even and odd rows, are rejected as values with two sources.

    Parameters
    ----------
    virtual : h5py.Dataset
        The virtual dataset.
    path : Path
        File of the virtual dataset.
    name : str
        Name of the virtual dataset, for messages.

    Returns
    -------
    dict of Path to tuple of int or None
        The files of the sources, with the shape of their chunks; None if a source has no chunks.

    Raises
    ------
    DataError
        If a source is not in the folder, missing, incomplete or virtual itself, if a value has no source, or if the
        bounds of two sources overlap.
    """
    folder, files, boxes, points = path.parent, dict[Path, tuple[int, ...] | None](), list[Bounds](), 0
    for source in virtual.virtual_sources():
        file_name, dataset_name = source.file_name, source.dset_name
        points += source.vspace.get_select_npoints()
        boxes.append(source.vspace.get_select_bounds())
        # HDF5 would replace % by the numbers of any files that exist.
        if "%" in file_name or "%" in dataset_name:
            raise DataError(
                f"{path}: virtual dataset {name!r} refers to numbered files {file_name!r}. Open a list of the files."
            )
        # HDF5 names the file itself by a dot.
        place = path if file_name == "." else folder / file_name
        if place not in files:
            check_inside(place, folder, f"{path}: virtual dataset {name!r}")
            files[place] = _check_source(place, dataset_name, virtual, f"{path}: virtual dataset {name!r}")
    # As many values with a source as there are values, and no overlap: then the sources cover the dataset.
    if points < math.prod(virtual.shape):
        raise DataError(
            f"{path}: virtual dataset {name!r} is incomplete: of its {math.prod(virtual.shape)} values {points} have a "
            "source"
        )
    if points > math.prod(virtual.shape) or _has_overlap(boxes):
        raise DataError(f"{path}: virtual dataset {name!r} has values with two sources. Write it with one for each.")
    return files


def _has_overlap(boxes: list[Bounds]) -> bool:
    """Return True if two boxes have an index in common. Both bounds of a box are inclusive."""
    boxes = sorted(boxes)
    for index, (low, high) in enumerate(boxes):
        for other_low, other_high in boxes[index + 1 :]:
            # In sorted order: boxes that begin after the end of this one cannot overlap with it.
            if other_low[0] > high[0]:
                break
            pairs = zip(low, high, other_low, other_high, strict=True)
            if all(a <= d and c <= b for a, b, c, d in pairs):
                return True
    return False


def _check_source(place: Path, dataset_name: str, virtual: h5py.Dataset, what: str) -> tuple[int, ...] | None:
    """Check one source and return the shape of its chunks; ``what`` names the virtual dataset in errors.

    HDF5 copies values, not attributes. So ``virtual`` must also have the attributes of its source that change values.
    """
    file, state = open_hdf5(place)
    with file:
        source = open_dataset(file, dataset_name.lstrip("/") or "/", place, state.size)
        lost, kept = decoding_attributes(source.attrs), decoding_attributes(virtual.attrs)
        if any(name not in kept or not np.array_equal(kept[name], lost[name], equal_nan=True) for name in lost):
            raise DataError(
                f"{what} lacks the attributes {', '.join(lost)} of its source {place}, which change the values. Copy "
                "them to the virtual dataset, or write decoded values."
            )
        return None if source.chunks is None else tuple(source.chunks)
