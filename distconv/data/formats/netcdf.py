"""netCDF, by xarray: values as their attributes decode them (``scale_factor``, ``add_offset``, ``_FillValue``)."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from distconv.data.formats.store import Slices, Store, Stored, check_numbers
from distconv.data.opened_file import dataset, opened
from distconv.errors import DataError


class NetCdf(Store):
    """Variables of a netCDF 4 file, ``group/variable`` those of a group."""

    libraries = ("h5netcdf", "xarray")

    def open(self) -> None:
        """Open the file and check the variables.

        Raises
        ------
        DataError
            If xarray or h5netcdf is not installed, or a variable is missing, incomplete, or no array of numbers.
        """
        try:
            import h5netcdf
            from xarray.backends import H5NetCDFStore
            from xarray.conventions import decode_cf_variable
        except ImportError as error:
            raise DataError(f"{self.path}: {error.name} is not installed: pip install 'distconv[netcdf]'") from error
        self._file, state = opened(self.path)
        self.states = {self.path: state}
        self._variables: dict[str, Any] = {}
        try:
            for name in self.names:
                dataset(self._file, name, self.path, state.size)
                group, _, variable = name.strip("/").rpartition("/")
                self._check_links(group)
                whole = h5netcdf.File(self._file, "r", phony_dims="access")
                tree = whole[group] if group else whole
                lazily = H5NetCDFStore(tree).open_store_variable(variable, tree.variables[variable])
                self._variables[name] = decode_cf_variable(variable, lazily, decode_times=False)
                self.stored[name] = self._stored(name, lazily.encoding.get("chunksizes"))
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            self._file.close()
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path}: dataset {name!r} cannot be opened as netCDF: {error}") from error

    def _stored(self, name: str, chunks: tuple[int, ...] | None) -> Stored:
        shape, dtype = self._variables[name].shape, self._variables[name].dtype
        check_numbers(self.path, name, shape, dtype)
        return Stored(tuple(shape), np.dtype(dtype), tuple(chunks or (1,) * (len(shape) - 1) + shape[-1:]))

    def _check_links(self, group: str) -> None:
        """The library looks at all that is in a group: let none of it be elsewhere."""
        parts = group.split("/") if group else []
        for depth in range(len(parts) + 1):
            above = self._file["/".join(["", *parts[:depth]]) or "/"]
            for name in above:
                if above.id.links.get_info(name.encode()).type not in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT):
                    raise DataError(f"{self.path}: {name!r} lies in other files; copy it into this one")

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """The values of a variable in ``box``, which is not empty."""
        values: NDArray[Any] = self._variables[name][box].values
        return values

    def attribute(self, name: str, group: str) -> object:
        """An attribute of a group, or None."""
        node = self._file.get(group or "/")
        return None if node is None else node.attrs.get(name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
