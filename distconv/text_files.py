"""Reading of the small text files that others write: plans, machines, layer profiles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from distconv.errors import DistconvError

LARGEST_BYTES = 10 << 20
"""Far more than any of them has: a larger one is another file, named by mistake."""


def read_text(path: str | os.PathLike[str], what: str, error: type[DistconvError]) -> str:
    """The UTF-8 text of a file of at most ``LARGEST_BYTES`` bytes; ``what`` is the kind of file, for messages.

    Raises
    ------
    error
        If it cannot be read, is larger, or is no such text.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character
        raise error(f"{what} {path} cannot be read: {getattr(failure, 'strerror', None) or failure}") from failure
    if len(content) > LARGEST_BYTES:
        raise error(f"{what} {path}: more than {LARGEST_BYTES} bytes are too many for a {what}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{what} {path} cannot be read: byte {failure.start} is no UTF-8 text") from failure


def parsed_json(text: str, what: str, error: type[DistconvError], constant: Callable[[str], object] = float) -> Any:
    """The content of a JSON text that has each key once; ``what`` names the file, for messages.

    ``constant`` makes something of NaN, Infinity and -Infinity, or refuses them with a ValueError.

    Raises
    ------
    error
        If it is no JSON, has a key twice, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=constant)
    except (ValueError, RecursionError) as failure:  # ValueError also for a number of thousands of digits
        raise error(f"{what} cannot be read as JSON: {failure}") from failure


def json_document(
    path: str | os.PathLike[str],
    what: str,
    error: type[DistconvError],
    *,
    marks: Mapping[str, Any],
    keys: Collection[str],
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """The JSON object in a file of ours: with these ``marks`` (format and version), these keys and no others.

    Raises
    ------
    error
        If the file is something else, or has NaN or Infinity in it, which JSON has not.
    """
    content = parsed_json(read_text(path, what, error), f"{what} {path}", error, _no_number)
    for name, expected in marks.items():
        kind = content.get(name) if isinstance(content, dict) else None
        if kind != expected:
            wanted = f"{json.dumps(name)}: {json.dumps(expected)}"
            raise error(f"{what} {path}: it must be an object with {wanted}, not {short(repr(kind))}")
    missing, unknown = sorted(set(keys) - set(content)), sorted(set(content) - {*marks, *keys, *optional})
    if missing or unknown:
        raise error(f"{what} {path}: {f'unknown keys {unknown}' if unknown else f'missing keys {missing}'}")
    return dict(content)


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")


def short(text: str, most: int = 60) -> str:
    """``text``, or its beginning and three dots: a file may hold anything of any size."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"key {short(repr(key))} is there twice, expected once")
        members[key] = value
    return members
