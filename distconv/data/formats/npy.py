"""NumPy's .npy files, mapped into memory: each file is a dataset with the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Url
from distconv.data.formats.store import Slices, Store, StoredDataset, check_inside, check_numeric, file_identities
from distconv.errors import DataError


class NpyFiles(Store):
    """``NAME.npy`` in a folder for each dataset, or one such file."""

    def open(self) -> None:
        """Map the files.

        Raises
        ------
        DataError
            If one is missing or truncated, is a link out of the folder, or holds Python objects.
        """
        paths = {name: self._path(name) for name in self.names}
        self._arrays = {name: self._mapped(name, path) for name, path in paths.items()}
        self.states = file_identities(paths.values())
        for name, array in self._arrays.items():
            check_numeric(self.path, name, array.shape, array.dtype)
            self.stored[name] = StoredDataset(array.shape, array.dtype, (1,) * (array.ndim - 1) + array.shape[-1:])

    def _path(self, name: str) -> Path:
        if isinstance(self.path, Url):
            raise DataError(f"{self.path}: .npy files are mapped into memory, from paths alone; copy it, or write zarr")
        if self.path.is_dir():
            path = self.path / f"{name}.npy"
            check_inside(path, self.path, f"{self.path}: dataset {name!r}")
            return path
        if name != self.path.stem:
            raise DataError(f"{self.path}: there is no dataset {name!r} in it; it is {self.path.stem!r}")
        check_inside(self.path, self.path.resolve().parent, f"dataset {name!r}")
        return self.path

    def _mapped(self, name: str, path: Path) -> NDArray[Any]:
        try:
            # This rejects arrays of Python objects: nothing is unpickled from a mapped file.
            return np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{path} cannot be mapped as an array of NumPy: {error}") from error

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of an array in ``box``, which is not empty.

        Parameters
        ----------
        name : str
            Name of the array.
        box : tuple of slice
            One slice for each dimension, in global indices.

        Returns
        -------
        ndarray
        """
        # Copied, so that the file is read here, in the reading thread, and not where the values are used.
        return np.array(self._arrays[name][box])

    def column(self, name: str) -> list[object] | None:
        """Return a file with one number or string per sample, if there is one."""
        if isinstance(self.path, Url) or not self.path.is_dir():
            return None
        path = self.path / f"{name}.npy"
        if not path.is_file():
            return None
        check_inside(path, self.path, f"{self.path}: {name!r}")
        values = self._mapped(name, path)
        return list(values.tolist()) if values.ndim == 1 and values.dtype.kind in "biufU" else None


def has_npy_files(path: Path) -> bool:
    """Return True if a path is a .npy file, or a folder that contains one."""
    return path.suffix == ".npy" or (path.is_dir() and next(path.rglob("*.npy"), None) is not None)
