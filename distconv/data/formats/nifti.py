"""NIfTI volumes, read by nibabel: a file is one sample (C, X, Y, Z), with nibabel's order of the voxels.

Of a ``.nii`` file, a read takes the box alone. A ``.nii.gz`` file is decompressed from its begin to the end of the box
at each read, unless the package ``indexed_gzip`` is installed, which nibabel then uses. The checksum of a ``.nii.gz``
file is not compared, since that would decompress all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location, Url
from distconv.data.coordinates import AFFINE, AFFINE_CODE, SPACE_UNITS
from distconv.data.formats.store import Slices, Store, StoredDataset, check_numeric
from distconv.data.opened_file import file_identity
from distconv.errors import DataError
from distconv.whole_files import open_regular

VOLUME = "image"
"""Name of the only dataset of a file."""
SUFFIXES = (".nii", ".nii.gz")

_MAX_DEFLATE = 1040
"""Bytes that one byte of a .gz file decompresses to at most."""


def is_nifti(path: Location) -> bool:
    """Return True if the name of a file has a suffix of NIfTI."""
    return str(path).lower().endswith(SUFFIXES)


def is_nifti_compressed(path: Location) -> bool:
    """Return True if the name of a NIfTI file is that of a compressed one."""
    return str(path).lower().endswith(".gz")


class NiftiFile(Store):
    """The volume of one NIfTI file, with a dimension of length 1 for samples, and one for channels.

    Values are scaled as nibabel's ``get_fdata`` does; integers without a scaling stay integers.
    """

    libraries: Sequence[str] = ("nibabel",)

    def open(self) -> None:
        """Read the header.

        Raises
        ------
        DataError
            If nibabel is not installed, or the file is missing, incomplete, damaged or at a URL.
        """
        if isinstance(self.path, Url):
            raise DataError(f"{self.path}: nibabel reads files, not URLs. Copy the file to this machine.")
        if other := [name for name in self.names if name != VOLUME]:
            raise DataError(
                f"{self.path}: there is no dataset {other[0]!r} in it. The only dataset of a NIfTI file is {VOLUME!r}."
            )
        nibabel = import_nibabel(self.path)
        # Opened by the operating system first: its errors are clearer, and a pipe would block nibabel.
        open_regular(self.path).close()
        self.states = {self.path: file_identity(self.path)}
        try:
            self._image = nibabel.load(str(self.path))
            self._file_shape = tuple(int(extent) for extent in self._image.shape)
            self._check_size(self.states[self.path].size)
            # The dtype after scaling, as nibabel itself finds it: by reading one voxel.
            dtype = np.asarray(self._image.dataobj[(0,) * len(self._file_shape)]).dtype
        except DataError:
            raise
        except Exception as error:  # of nibabel, NumPy or zlib
            text = " ".join(f"{error}".split()) or type(error).__name__
            raise DataError(f"{self.path} cannot be opened as a NIfTI volume: {text}") from error
        space = (*self._file_shape[:3], 1, 1)[:3]
        shape = (1, self._channels, *space)
        check_numeric(self.path, VOLUME, shape, dtype)
        # Of a compressed file, reading one voxel may decompress all others.
        chunks = (1, self._channels, *space) if is_nifti_compressed(self.path) else (1, 1, space[0], 1, 1)
        self.stored = {name: StoredDataset(shape, dtype, chunks) for name in self.names}

    def _check_size(self, size: int) -> None:
        """Check that there are voxels, and that a file of ``size`` bytes can hold them."""
        header, extents = self._image.header, self._file_shape
        if not len(extents) >= 1 or min(extents) < 1 or len([e for e in extents[3:] if e > 1]) > 1:
            raise DataError(
                f"{self.path} has the shape {extents}, but a volume is (x, y, z) or (x, y, z, channels). Convert it."
            )
        stored = int(np.prod(extents, dtype=object)) * header.get_data_dtype().itemsize
        is_compressed = is_nifti_compressed(self.path)
        needed = -(-stored // _MAX_DEFLATE) if is_compressed else stored + int(header.get_data_offset())
        if needed > size:
            raise DataError(
                f"{self.path} is incomplete: it has {size} bytes, and a volume of {extents} takes {needed} at least"
            )

    @property
    def _channels(self) -> int:
        return int(np.prod(self._file_shape[3:], dtype=np.int64))

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of the volume in ``box``, which is not empty.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : tuple of slice
            Slices of samples, channels, x, y and z.

        Returns
        -------
        ndarray
        """
        _, channels, *space = box
        # Dimensions that the file lacks have one index; of those after z, at most one has more.
        later = (channels if extent > 1 else slice(0, 1) for extent in self._file_shape[3:])
        stored = np.asarray(self._image.dataobj[(*space[: len(self._file_shape)], *later)])
        extents = [each.stop - each.start for each in space]
        return np.moveaxis(stored.reshape(*extents, -1), -1, 0)[None]

    def dims(self, name: str) -> tuple[str, ...] | None:
        """Return names of the dimensions: samples, channels and the axes of the voxels."""
        return ("sample", "channel", "x", "y", "z")

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the affine of the volume (16 numbers, row by row), its code, and the units of space."""
        header = self._image.header
        code = header["sform_code"] or header["qform_code"]
        return {
            AFFINE: [float(each) for each in self._image.affine.ravel()],
            AFFINE_CODE: int(code),
            SPACE_UNITS: str(header.get_xyzt_units()[0]),
        }


def import_nibabel(path: object) -> Any:
    """Return the module nibabel.

    Parameters
    ----------
    path : object
        File that requires it, for the error.

    Returns
    -------
    module

    Raises
    ------
    DataError
        If it is not installed.
    """
    try:
        import nibabel
    except ImportError as error:
        raise DataError(f"{path}: nibabel is not installed: pip install 'distconv[medical]'") from error
    return nibabel
