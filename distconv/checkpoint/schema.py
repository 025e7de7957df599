"""Schema of the manifest of a checkpoint, and the checks that a schema cannot express.

A manifest may come from anyone. After :func:`check_manifest` its tensors are covered by their pieces, and its files are
as large as these, so reading needs no more checks of sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from distconv.checkpoint.files import max_file_bytes, storage_dtype
from distconv.checkpoint.pieces import check_cover, piece_box
from distconv.checkpoint.values import from_json, tensor_names
from distconv.errors import CheckpointError
from distconv.text_files import decode, describe_value

_STATE = re.compile(r"state-[0-9a-f]{12}\.h5")
_PLAIN = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float\w+|complex(64|128))")
"""Dtypes of plain numbers. A quantized tensor would also need its scales."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number below 2**63")]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="64 hexadecimal digits")]


# Keys that are not here are allowed, unlike in files that people write.
class _Head(msgspec.Struct):
    """The keys that determine the order of commits."""

    step: _Count
    serial: _Count = 0
    damaged: list[_Digest] = msgspec.field(default_factory=list)


class _StateFile(msgspec.Struct):
    bytes: _Count
    sha256: _Digest


class _Piece(msgspec.Struct):
    file: str
    box: list[tuple[_Count, _Count]]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Count], Meta(max_length=32, description="at most 32 dimensions")]  # HDF5 has no more
    pieces: list[_Piece]


class _Manifest(_Head, kw_only=True):
    values: dict[str, Any]
    files: dict[str, _StateFile]
    tensors: dict[str, _Tensor]


def tensor_dtype(entry: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor's entry in a manifest."""
    return getattr(torch, entry["dtype"].removeprefix("torch."))  # type: ignore[no-any-return]


def check_head(manifest: Mapping[str, Any]) -> None:
    """Check the keys that determine which checkpoint is newer; the cost does not depend on the number of tensors.

    Raises
    ------
    CheckpointError
        If one of them is missing or wrong.
    """
    decode(manifest, _Head, "", CheckpointError)


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check that ``manifest`` is one that distconv may have written.

    Raises
    ------
    CheckpointError
        If it is not; the error names the first key that is wrong.
    """
    # The schema first: the checks that follow rely on keys and types.
    decode(manifest, _Manifest, "", CheckpointError)
    try:
        values = from_json(manifest["values"])
    except ValueError as error:
        raise CheckpointError(f"values: {error}") from error
    for name in tensor_names(values):
        if name not in manifest["tensors"]:
            raise CheckpointError(f"values: there is no tensor {name!r}")
    for name in manifest["files"]:
        if not _STATE.fullmatch(name):
            raise CheckpointError(f"it refers to the file {name!r}")
    for name, entry in manifest["tensors"].items():
        if not _is_storable_dtype(entry["dtype"]):
            raise CheckpointError(
                f"tensor {name!r}: dtype: found {describe_value(entry['dtype'])}, expected one of numbers"
            )
        if not all(piece["file"] in manifest["files"] for piece in entry["pieces"]):
            raise CheckpointError(f"a piece of {name!r} is in none of its files")
        check_cover(name, entry)
    _check_sizes(manifest)


def _check_sizes(manifest: Mapping[str, Any]) -> None:
    """Check that each file is as large as its pieces and their metadata: values are stored without compression."""
    pieces: dict[str, dict[str, int]] = {name: {} for name in manifest["files"]}
    for name, entry in manifest["tensors"].items():
        for piece in entry["pieces"]:
            # A product of Python integers, which does not overflow, whatever shape the manifest claims.
            nbytes = tensor_dtype(entry).itemsize
            for interval in piece_box(piece):
                nbytes *= interval.extent
            pieces[piece["file"]][name] = pieces[piece["file"]].get(name, 0) + nbytes
    for name, file in manifest["files"].items():
        values, most = sum(pieces[name].values()), max_file_bytes(pieces[name])
        if not values <= file["bytes"] <= most:
            raise CheckpointError(
                f"{name} has {file['bytes']} bytes, but its tensors take {values}, and {most} at most"
            )


def _is_storable_dtype(name: str) -> bool:
    """Return True if checkpoints can hold tensors of the dtype with this name."""
    dtype = getattr(torch, name.removeprefix("torch."), None) if _PLAIN.fullmatch(name) else None
    try:
        return isinstance(dtype, torch.dtype) and storage_dtype(dtype).itemsize > 0
    except (TypeError, RuntimeError):
        return False
