"""Decoding of values whose meaning is in attributes, by xarray: netCDF's CF conventions, for any format.

``scale_factor``, ``add_offset``, ``_FillValue``, ``missing_value``, ``_Unsigned`` and xarray's ``dtype = "bool"`` are
decoded as ``xarray.open_dataset(..., decode_times=False)`` does. As in xarray, ``valid_range`` masks nothing. Times
stay numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location
from distconv.errors import DataError

_DECODED = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


def decoding_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that change values.

    Parameters
    ----------
    attributes : mapping
        Attributes of a dataset, from HDF5 or from JSON.

    Returns
    -------
    dict
        Those that xarray decodes, with the values that its own backends would pass. Empty if none changes values.
    """
    found = {name: _unwrap(attributes[name]) for name in _DECODED if name in attributes}
    if "dtype" in attributes and _unwrap(attributes["dtype"]) == "bool":
        found["dtype"] = "bool"
    return found


def _unwrap(value: Any) -> Any:
    """Return an attribute's value as xarray's backends do: HDF5 has numbers in arrays, and strings as bytes."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass(frozen=True)
class Decoder:
    """Decodes the stored values of one dataset."""

    path: Location
    """Location of the dataset, for errors."""
    name: str
    attributes: Mapping[str, Any]
    """Result of :func:`decoding_attributes`. If it is empty, values are returned unchanged, without xarray."""

    def dtype(self, stored: np.dtype) -> np.dtype:
        """Return the dtype of decoded values.

        Raises
        ------
        DataError
            If xarray is not installed, or cannot decode such values.
        """
        # By xarray's own rules, on an empty array.
        return self.decode(np.empty(0, stored)).dtype

    def decode(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the decoded values.

        Raises
        ------
        DataError
            If xarray is not installed, or cannot decode them.
        """
        if not self.attributes:
            return values
        listed = ", ".join(self.attributes)
        try:
            import xarray
            from xarray.conventions import decode_cf_variable
        except ImportError as error:
            raise DataError(
                f"{self.path}: dataset {self.name!r} has attributes ({listed}) that change its values, and no "
                f"{error.name} is installed to decode them. Install it: pip install 'distconv[netcdf]'."
            ) from error
        variable = xarray.Variable([f"dim{axis}" for axis in range(values.ndim)], values, dict(self.attributes))
        try:
            decoded = decode_cf_variable(self.name, variable, decode_times=False, decode_timedelta=False)
            return np.asarray(decoded.values)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{self.path}: dataset {self.name!r} has attributes ({listed}) that xarray cannot decode: {error}. "
                "Correct the attributes, or write decoded values."
            ) from error
