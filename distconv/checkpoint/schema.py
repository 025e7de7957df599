"""What the manifest of a checkpoint must be: whatever else it is, there is one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distconv.checkpoint.files import room_for, stored_as
from distconv.checkpoint.pieces import box_of, check_cover
from distconv.checkpoint.values import from_json, tensor_names
from distconv.errors import CheckpointError

_STATE = re.compile(r"state-[0-9a-f]{12}\.h5")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float\w+|complex(64|128))")
"""Types of numbers; a quantized one has scales beside it."""
_MOST_DIMENSIONS = 32
"""HDF5 has no more."""


def dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a tensor that a manifest lists."""
    return getattr(torch, entry["dtype"].removeprefix("torch."))  # type: ignore[no-any-return]


def check(manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming what is wrong, unless ``manifest`` is one that we may have written.

    Raises
    ------
    CheckpointError
        If it is not.
    """
    check_head(manifest)
    for name in ("values", "files", "tensors"):
        _demand(name, manifest.get(name), lambda each: isinstance(each, dict))
    try:
        values = from_json(manifest["values"])
    except ValueError as error:
        raise CheckpointError(f"values: {error}") from error
    for name in tensor_names(values):
        _demand(f"tensor {name!r} of the values", name, lambda each: each in manifest["tensors"])
    for name, file in manifest["files"].items():
        if not _STATE.fullmatch(name):
            raise CheckpointError(f"it refers to the file {name!r}")
        _demand(name, file, lambda each: isinstance(each, dict))
        _demand(f"{name}: bytes", file.get("bytes"), _is_count)
        _demand(f"{name}: sha256", file.get("sha256"), _is_digest)
    for name, entry in manifest["tensors"].items():
        _check_tensor(name, entry, manifest["files"])
    _check_sizes(manifest)


def check_head(manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless its step and its place among the commits are such: quickly, however long it is.

    Raises
    ------
    CheckpointError
        If they are not.
    """
    _demand("step", manifest.get("step"), _is_count)
    _demand("serial", manifest.get("serial", 0), _is_count)
    _demand("damaged", manifest.get("damaged", []), lambda each: isinstance(each, list) and all(map(_is_digest, each)))


def _check_tensor(name: str, entry: Any, files: Mapping[str, Any]) -> None:
    what = f"tensor {name!r}"
    _demand(what, entry, lambda each: isinstance(each, dict))
    _demand(f"{what}: dtype", entry.get("dtype"), _is_dtype)
    _demand(f"{what}: shape", entry.get("shape"), lambda each: isinstance(each, list) and all(map(_is_count, each)))
    _demand(f"{what}: dimensions", len(entry["shape"]), lambda number: number <= _MOST_DIMENSIONS)
    _demand(f"{what}: pieces", entry.get("pieces"), lambda each: isinstance(each, list))
    for piece in entry["pieces"]:
        _demand(f"{what}: a piece", piece, lambda each: isinstance(each, dict))
        if not isinstance(piece.get("file"), str) or piece["file"] not in files:
            raise CheckpointError(f"a piece of {name!r} is in none of its files")
        _demand(
            f"{what}: a box", piece.get("box"), lambda each: isinstance(each, list) and all(map(_is_interval, each))
        )
    check_cover(name, entry)


def _check_sizes(manifest: Mapping[str, Any]) -> None:
    """Values lie in files as they are: a file is as large as its pieces, and a little that describes them."""
    pieces: dict[str, dict[str, int]] = {name: {} for name in manifest["files"]}
    for name, entry in manifest["tensors"].items():
        for piece in entry["pieces"]:
            nbytes = dtype_of(entry).itemsize
            for interval in box_of(piece):
                nbytes *= interval.extent
            pieces[piece["file"]][name] = pieces[piece["file"]].get(name, 0) + nbytes
    for name, file in manifest["files"].items():
        values, most = sum(pieces[name].values()), room_for(pieces[name])
        if not values <= file["bytes"] <= most:
            raise CheckpointError(
                f"{name} has {file['bytes']} bytes, but what it is to hold takes {values}, and {most} at most"
            )


def _demand(what: str, value: Any, is_right: Callable[[Any], bool]) -> None:
    if not is_right(value):
        text = repr(value)
        raise CheckpointError(f"{what} cannot be {text if len(text) < 60 else text[:57] + '...'}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_dtype(value: Any) -> bool:
    """Whether it names a type whose values we write."""
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        return False
    dtype = getattr(torch, value.removeprefix("torch."), None)
    try:
        return isinstance(dtype, torch.dtype) and stored_as(dtype).itemsize > 0
    except (TypeError, RuntimeError):
        return False
