"""HDF5 virtual datasets: their sources lie in the folder of the file, and cover them.

HDF5 gives fill values where a source is missing, and opens whatever path a file names; so all is looked at before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from distconv.data.formats.decoding import decoded_attributes
from distconv.data.formats.store import check_inside
from distconv.data.opened_file import dataset, opened
from distconv.errors import DataError

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def sources_of(virtual: h5py.Dataset, path: Path, name: str) -> dict[Path, tuple[int, ...] | None]:
    """The files that hold what the virtual dataset ``name`` of ``path`` shows, with their chunks.

    Raises
    ------
    DataError
        If one of them is not in the folder, is missing, incomplete or virtual itself, or part of the dataset has none.
    """
    folder, files, boxes, points = path.parent, dict[Path, tuple[int, ...] | None](), list[Bounds](), 0
    for file_name, dataset_name, bounds, count in _parts(virtual):
        points += count
        boxes.append(bounds)
        if "%" in file_name or "%" in dataset_name:
            raise DataError(f"{path}: virtual dataset {name!r} is made of numbered files {file_name!r}; list them")
        place = path if file_name == "." else folder / file_name
        if place not in files:
            check_inside(place, folder, f"{path}: virtual dataset {name!r}")
            files[place] = _checked_source(place, dataset_name, virtual, f"{path}: virtual dataset {name!r}")
    if points < math.prod(virtual.shape):
        raise DataError(
            f"{path}: virtual dataset {name!r} is incomplete: of its {math.prod(virtual.shape)} values {points} have a "
            "source"
        )
    if points > math.prod(virtual.shape) or _overlap(boxes):
        raise DataError(f"{path}: virtual dataset {name!r} has values with two sources; write it with one for each")
    return files


def _parts(virtual: h5py.Dataset) -> Iterator[tuple[str, str, Bounds, int]]:
    """File and dataset of each source, the box that holds what comes from it, and how much that is."""
    for source in virtual.virtual_sources():
        bounds = source.vspace.get_select_bounds()
        yield source.file_name, source.dset_name, bounds, source.vspace.get_select_npoints()


def _overlap(boxes: list[Bounds]) -> bool:
    """Whether two of them have an index in common; both ends are in a box."""
    boxes = sorted(boxes)
    for index, (low, high) in enumerate(boxes):
        for other_low, other_high in boxes[index + 1 :]:
            if other_low[0] > high[0]:
                break
            pairs = zip(low, high, other_low, other_high, strict=True)
            if all(a <= d and c <= b for a, b, c, d in pairs):
                return True
    return False


def _checked_source(place: Path, dataset_name: str, virtual: h5py.Dataset, what: str) -> tuple[int, ...] | None:
    file, state = opened(place)
    with file:
        source = dataset(file, dataset_name.lstrip("/") or "/", place, state.size)
        lost, kept = decoded_attributes(source.attrs), decoded_attributes(virtual.attrs)
        if any(name not in kept or not np.array_equal(kept[name], lost[name], equal_nan=True) for name in lost):
            raise DataError(
                f"{what} has not the attributes {', '.join(lost)} of its source {place}, which change the values. Copy "
                "them to the virtual dataset, or write decoded values."
            )
        return None if source.chunks is None else tuple(source.chunks)
