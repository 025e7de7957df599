"""Coordinates and attributes of variables on a grid, as netCDF and xarray have them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError

AFFINE, AFFINE_CODE, SPACE_UNITS = "affine", "affine_code", "space_units"
SPACE_ATTRIBUTES = (AFFINE, AFFINE_CODE, SPACE_UNITS)
"""Attributes of volumes: the matrix from indices of voxels to positions in space, NIfTI's code of it, and its units.

The matrix has 16 numbers, row by row. Several samples have 16 numbers each, unless all have the same matrix.
"""


@dataclass(frozen=True, eq=False)
class Coordinate:
    """Values along a dimension, as stored: times are numbers, whose units and calendar are attributes."""

    dims: tuple[str, ...]
    values: NDArray[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a hash of values and attributes."""
        described = f"{self.values.dtype} {self.values.shape} {sorted(self.attributes.items())}".encode()
        return hashlib.blake2b(described + self.values.tobytes(), digest_size=16).hexdigest()


def to_coordinate(name: str, values: Any, extent: int, what: str) -> Coordinate:
    """Return values along a dimension as a coordinate. Dates become numbers with units, as xarray encodes them.

    Parameters
    ----------
    name : str
        Name of the dimension.
    values : Coordinate or array
        The values: numbers or dates.
    extent : int
        Number of indices along the dimension.
    what : str
        The caller, with which an error begins.

    Returns
    -------
    Coordinate

    Raises
    ------
    DataError
        If they are not one value for each index, or cannot be stored.
    """
    if isinstance(values, Coordinate):
        stored, attributes = np.asarray(values.values), dict(values.attributes)
    else:
        # A tensor of torch, which reading processes do not import.
        stored = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
        attributes = {}
        if stored.dtype.kind in "MmO":
            stored, attributes = _encode_dates(name, stored, what)
    if stored.shape != (extent,) or stored.dtype.kind not in "biuf":
        raise DataError(
            f"{what}: coords[{name!r}] is {stored.dtype} {stored.shape}. Give {extent} numbers or dates, one for each "
            "index of the dimension."
        )
    return Coordinate((name,), stored, check_attributes(attributes, f"{what}: coords[{name!r}]"))


def _encode_dates(name: str, dates: NDArray[Any], what: str) -> tuple[NDArray[Any], dict[str, Any]]:
    try:
        import xarray
        from xarray.conventions import encode_cf_variable

        encoded = encode_cf_variable(xarray.Variable((name,), dates), name=name)
        return np.asarray(encoded.values), dict(encoded.attrs)
    except Exception as error:  # of several libraries
        raise DataError(f"{what}: coords[{name!r}]: xarray cannot encode these dates: {error}") from error


def check_attributes(attributes: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return attributes as numbers, strings and lists of numbers, which all formats store.

    Parameters
    ----------
    attributes : mapping of str to object
        The attributes.
    what : str
        Their place, with which an error begins.

    Returns
    -------
    dict of str to object

    Raises
    ------
    DataError
        If one has another type.
    """
    plain = {}
    for key, value in attributes.items():
        # NetCDF has no matrices: their numbers are stored row by row.
        found = np.asarray(value).ravel().tolist() if np.ndim(value) > 1 else value
        found = found.tolist() if hasattr(found, "tolist") else found
        numbers = found if isinstance(found, list | tuple) else [found]
        is_number = all(isinstance(each, int | float) for each in numbers) and len(numbers) > 0
        if not isinstance(key, str) or not (isinstance(found, str) or is_number):
            raise DataError(f"{what}: attribute {key!r} is {value!r}. Give a string, a number or a list of numbers.")
        plain[key] = list(found) if isinstance(found, tuple) else found
    return plain


@dataclass(frozen=True, eq=False)
class VariableLabels:
    """Names of a variable's dimensions, their coordinates, and the variable's attributes."""

    dims: tuple[str, ...] | None = None
    coords: Mapping[str, Coordinate] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> dict[str, Any]:
        """The labels as JSON values, with a digest of each coordinate."""
        digests = {name: each.digest() for name, each in self.coords.items()}
        dims = None if self.dims is None else list(self.dims)
        named = {"dims": dims, "coords": digests, "attrs": dict(self.attributes)}
        return {key: value for key, value in named.items() if value}


def to_labels(
    shapes: Mapping[str, Sequence[int]],
    dims: Mapping[str, Sequence[str] | None],
    coords: Mapping[str, Any] | None,
    attributes: Mapping[str, Mapping[str, Any] | None],
    what: str,
) -> dict[str, VariableLabels]:
    """Check the labels of variables that are written together.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        Shape of each variable.
    dims : mapping of str to sequence of str or None
        Names of the dimensions of each variable, or None.
    coords : mapping of str to array, optional
        Values along dimensions.
    attributes : mapping of str to mapping or None
        Attributes of variables.
    what : str
        The caller, with which an error begins.

    Returns
    -------
    dict of str to VariableLabels
        The labels of each variable. All have all coordinates.

    Raises
    ------
    DataError
        If they do not fit the shapes, or each other.
    """
    unknown = sorted((set(dims) | set(attributes)) - set(shapes))
    if unknown:
        raise DataError(f"{what}: dims or attrs name {unknown[0]!r}, but the tensors are {', '.join(shapes)}")
    extents: dict[str, int] = {}
    for variable, shape in shapes.items():
        names = dims.get(variable)
        if names is None:
            continue
        valid = all(isinstance(name, str) and name and "/" not in name for name in names)
        if isinstance(names, str) or len(names) != len(shape) or len(set(names)) != len(names) or not valid:
            raise DataError(
                f"{what}: dims={names!r}. Give each of the {len(shape)} dimensions of {tuple(shape)} a name of its own."
            )
        if set(names) & set(shapes):
            raise DataError(f"{what}: dims={names!r}: a tensor has the name of a dimension. Rename one of them.")
        for name, extent in zip(names, shape, strict=True):
            if extents.setdefault(name, extent) != extent:
                raise DataError(f"{what}: dimension {name!r} has {extents[name]} and {extent} indices")
    unknown = sorted(set(coords or {}) - set(extents))
    if unknown:
        raise DataError(
            f"{what}: coords[{unknown[0]!r}]: the dimensions (dims) are {', '.join(extents) or 'not named'}"
        )
    checked = {name: to_coordinate(name, values, extents[name], what) for name, values in (coords or {}).items()}
    found = {}
    for variable in shapes:
        names, given = dims.get(variable), attributes.get(variable) or {}
        found[variable] = VariableLabels(
            None if names is None else tuple(names), checked, check_attributes(given, f"{what}: attrs of {variable!r}")
        )
    return found


# -- labels of several files -------------------------------------------------------------------------------------------


def join_labels(path: object, labels: Sequence[VariableLabels]) -> VariableLabels:
    """Return the labels of samples that are concatenated along dimension 0, from those of each part.

    Parameters
    ----------
    path : object
        Location of the files, for errors.
    labels : sequence of VariableLabels
        Labels of the same variable in each part.

    Returns
    -------
    VariableLabels
        What all parts have in common. The coordinates of dimension 0 are joined, and so are affine matrices. Without
        dimensions, if the parts have other ones.
    """
    first, *others = labels
    if not others:
        return first
    dims = first.dims if all(each.dims == first.dims for each in others) else None
    coords = {}
    for name, of_first in first.coords.items() if dims else ():
        found = [each.coords[name] for each in labels if name in each.coords]
        if name == dims[0] and len(found) == len(labels):  # type: ignore[index]  # dims is not None in the loop
            try:
                coords[name] = join_times(path, found)
            except DataError as error:
                warnings.warn(f"the files' coordinates {name!r} are left out: {error}", stacklevel=2)
        elif len({each.digest() for each in found}) == 1 and len(found) == len(labels):
            coords[name] = of_first
    attributes = {
        key: value
        for key, value in first.attributes.items()
        if all(key in each.attributes and each.attributes[key] == value for each in others)
    }
    if all(AFFINE in each.attributes for each in labels):
        attributes[AFFINE] = [number for each in labels for number in each.attributes[AFFINE]]
    return VariableLabels(dims, coords, attributes)


def decode_times(path: object, times: Coordinate) -> Any:
    """Return times as xarray decodes them: an index of dates of the calendar.

    Parameters
    ----------
    path : object
        Location of the files, for errors.
    times : Coordinate
        Numbers with units and calendar.

    Returns
    -------
    pandas.Index

    Raises
    ------
    DataError
        If xarray cannot decode them.
    """
    try:
        import xarray

        decoded = xarray.decode_cf(xarray.Dataset({"time": ("time", times.values, dict(times.attributes))}))
        return decoded.indexes["time"]
    except Exception as error:  # xarray raises errors of several libraries
        raise DataError(
            f"{path}: xarray cannot decode the times ({dict(times.attributes)}): {error}. Select times by a slice of "
            "stored steps."
        ) from error


def join_times(path: object, times: Sequence[Coordinate]) -> Coordinate:
    """Return the times of several files one after the other, in the units of the first file.

    Parameters
    ----------
    path : object
        Location of the files, for errors.
    times : sequence of Coordinate
        Numbers with units and calendar, or without.

    Returns
    -------
    Coordinate

    Raises
    ------
    DataError
        If they cannot be converted to the same units.
    """
    first = times[0]
    units, calendar = first.attributes.get("units"), first.attributes.get("calendar", "standard")
    joined = [first.values]
    for each in times[1:]:
        if each.attributes.get("calendar", "standard") != calendar:
            raise DataError(f"{path}: the files have times of different calendars")
        if each.attributes.get("units") == units:
            joined.append(each.values)
            continue
        dates = decode_times(path, each).to_numpy()
        try:
            from xarray.coding.times import encode_cf_datetime

            joined.append(encode_cf_datetime(dates, units, calendar)[0])
        except Exception as error:  # of several libraries
            raise DataError(f"{path}: times in {each.attributes.get('units')!r} do not convert to {units!r}") from error
    return Coordinate(first.dims, np.concatenate(joined), first.attributes)
