"""zarr groups, format 2 and 3: an array of the group is a dataset.

As zarr defines it, a chunk that is not stored has the fill value. A group that :func:`distconv.write` has not finished
is rejected.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.data.address import Location, Url
from distconv.data.formats.decoding import Decoder, decoding_attributes
from distconv.data.formats.store import Slices, Store, StoredDataset, check_inside, check_numeric, file_identities
from distconv.errors import DataError

UNFINISHED = "distconv_unfinished"
"""Attribute that a group has while it is being written."""

_CODECS = frozenset(
    "bytes transpose sharding_indexed gzip zstd blosc zlib lz4 lzma bz2 crc32 crc32c adler32 fletcher32 shuffle delta "
    "fixedscaleoffset quantize bitround astype packbits".split()
)
"""Codecs that only compute. Others decode Python objects, and pickles run code."""

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zmetadata", ".zattrs")


class ZarrGroup(Store):
    """Arrays of a zarr group in a folder or at a URL.

    ``states`` has the files of metadata only. A change of a chunk is not detected.
    """

    libraries: Sequence[str] = ("zarr",)

    def open(self) -> None:
        """Open the group and check the arrays.

        Raises
        ------
        DataError
            If zarr is not installed, an array is missing, or its values are not numbers.
        """
        try:
            import zarr
        except ImportError as error:
            raise DataError(f"{self.path}: zarr is not installed: pip install 'distconv[zarr]'") from error
        try:
            self._group = zarr.open_group(_zarr_store(self.path), mode="r")
            self._arrays = {name: self._group.get(name) for name in self.names}
        except DataError:
            raise
        except Exception as error:
            text = " ".join(f"{error}".split()) or type(error).__name__
            raise DataError(f"{self.path} cannot be opened as a zarr group: {text}") from error
        # Before any value is read: chunks that are not written yet would have the fill value.
        if self._group.attrs.get(UNFINISHED):
            raise DataError(f"{self.path} is incomplete: its writer has not finished. Wait for it, or write it again.")
        self._decoders: dict[str, Decoder] = {}
        for name, array in self._arrays.items():
            self.stored[name] = self._checked(name, array)
        if any(each.attributes for each in self._decoders.values()):
            self.libraries = ("zarr", "xarray")
        folders: list[Location] = [self.path, *(self.path / name for name in self.names)]
        files = (folder / each for folder in folders for each in _METADATA)
        self.states = file_identities(file for file in files if file.is_file())

    def _checked(self, name: str, array: Any) -> StoredDataset:
        if array is None:
            has = ", ".join(sorted(self._group.array_keys())) or "no arrays"
            raise DataError(f"{self.path}: there is no dataset {name!r} in it; at its top are {has}")
        if not hasattr(array, "chunks"):
            raise DataError(f"{self.path}: {name!r} is a group, not a dataset")
        check_numeric(self.path, name, array.shape, array.dtype)
        self._decoders[name] = self._decoder(name, array)
        dtype = self._decoders[name].dtype(array.dtype)
        # Again, since decoding changes the dtype.
        check_numeric(self.path, name, array.shape, dtype)
        if others := sorted(set(_codec_names(array.metadata.to_dict())) - _CODECS):
            raise DataError(
                f"{self.path}: dataset {name!r} is encoded by {', '.join(others)}, which may run code and is not "
                f"supported. Write it again with another codec, such as {', '.join(sorted(_CODECS)[:3])}."
            )
        return StoredDataset(tuple(array.shape), dtype, tuple(array.chunks))

    def _decoder(self, name: str, array: Any) -> Decoder:
        """Return the decoder of an array, with the attributes as xarray itself stores them.

        In format 2 xarray stores ``_FillValue`` as the array's fill value; in format 3 it encodes it in base64.
        """
        attributes = array.attrs.asdict()
        meaning = decoding_attributes(attributes)
        if array.metadata.zarr_format == 2:
            # In format 2, xarray and netCDF store _FillValue as zarr's own fill value.
            if not {"_ARRAY_DIMENSIONS", "_nczarr_array"}.isdisjoint(attributes) and array.fill_value is not None:
                meaning["_FillValue"] = array.fill_value
        elif isinstance(meaning.get("_FillValue"), str):
            try:
                meaning["_FillValue"] = np.frombuffer(base64.b64decode(meaning["_FillValue"]), "<f8")[0]
            except ValueError as error:
                raise DataError(
                    f"{self.path}: dataset {name!r}: _FillValue {meaning['_FillValue']!r}: {error}"
                ) from error
        return Decoder(self.path, name, meaning)

    def values(self, name: str, box: Slices) -> NDArray[Any]:
        """Return the values of a dataset in ``box``, which is not empty.

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
        return self._decoders[name].decode(np.asarray(self._arrays[name][box]))

    def column(self, name: str) -> list[object] | None:
        """Return an array with one number or string per sample, if there is one."""
        array = self._group.get(name)
        if array is None or getattr(array, "ndim", 0) != 1 or array.dtype.kind not in "biufU":
            return None
        values = array[:] if array.dtype.kind == "U" else self._decoder(name, array).decode(array[:])
        return list(values.tolist())

    def has(self, name: str) -> bool:
        """Return True if the group has an array of numbers of this name."""
        array = self._group.get(name)
        return bool(hasattr(array, "chunks") and array.ndim and array.dtype.kind in "biuf")

    def dims(self, name: str) -> tuple[str, ...] | None:
        """Return the names of an array's dimensions, or None if they are not stored."""
        array = self._arrays[name]
        stored = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
        names = tuple(str(each) for each in stored or () if each)
        return names if names and len(names) == array.ndim else None

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of an array, without those by which its values are decoded."""
        left_out = {"_ARRAY_DIMENSIONS", *self._decoders[name].attributes}
        return {key: value for key, value in self._arrays[name].attrs.asdict().items() if key not in left_out}

    def attribute(self, name: str, group: str) -> object:
        """Return an attribute of a group, or None if the group lacks it.

        Parameters
        ----------
        name : str
            Name of the attribute.
        group : str
            Path of the group, "/" for the file itself.

        Returns
        -------
        object
        """
        node = self._group if group in ("", "/") else self._group.get(group)
        return None if node is None else node.attrs.get(name)


def _zarr_store(place: Location) -> Any:
    """Return a zarr store of the folder or URL."""
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(place.url, read_only=True) if isinstance(place, Url) else _confined_store(place)


def _confined_store(folder: Path) -> Any:
    """Return a zarr store of the folder that rejects pipes, and links to files outside the folder."""
    from zarr.storage import LocalStore

    def checked(key: str) -> None:
        # A missing chunk has the fill value, and a folder is listed only.
        path = folder / key
        if path.exists() and not path.is_dir():
            check_inside(path, folder, f"{folder}: {key}")

    # zarr reads values by any of these three methods.
    class Inside(LocalStore):  # type: ignore[misc]
        """A store that checks each file before it reads it."""

        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            checked(key)
            return await super().get(key, *arguments, **options)

        def get_sync(self, key: str, **options: Any) -> Any:
            checked(key)
            return super().get_sync(key, **options)

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
            key_ranges = list(key_ranges)
            for key, _ in key_ranges:
                checked(key)
            return await super().get_partial_values(prototype, key_ranges)

    return Inside(folder, read_only=True)


def _codec_names(metadata: Any, within: bool = False) -> Iterator[str]:
    """Yield the names of all codecs in the metadata of an array, nested ones included.

    ``within`` is True if ``metadata`` is part of a codec or of a list of codecs. Otherwise its names are not codecs.
    """
    if isinstance(metadata, list | tuple):
        for each in metadata:
            yield from _codec_names(each, within)
    elif isinstance(metadata, dict):
        if within and (name := metadata.get("id", metadata.get("name"))):
            yield str(name).removeprefix("numcodecs.")
        for key, value in metadata.items():
            inside = key in ("codecs", "index_codecs", "filters", "compressor")
            if inside or (within and key == "configuration"):
                yield from _codec_names(value, inside)
    elif within and metadata is not None:
        yield str(getattr(metadata, "codec_id", type(metadata).__name__.lower()))
