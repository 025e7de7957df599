"""Reading of the small text files that others write: plans, machines, layer profiles."""

from __future__ import annotations

import os

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
