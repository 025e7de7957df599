"""Files that are written whole or not at all, in folders where others may have put links.

::

    1  beside    a new file, of a name that nobody has, in the same folder
    2  forced    to the disk
    3  renamed   over what has the name: a link there is replaced, not followed

The folder is held open all the while, so that no step goes elsewhere when a link takes the folder's place.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"
"""Ending of what is not finished."""

_DESCRIPTORS = ("/dev", "/proc")
"""Where names may stand for what a process has open, such as /dev/stdout."""


class Folder:
    """A folder that is held open. Names in it lead to what lies in it: no link there is followed.

    The ``path`` itself may lead over links, as whoever named it meant; not so that of a folder ``within`` another.
    ``make`` it, if it is not there. What cannot be done is an OSError that names the file.
    """

    path: Path
    _descriptor: int

    def __init__(self, path: str | os.PathLike[str], *, make: bool = False, within: Folder | None = None) -> None:
        self.path = Path(path) if within is None else within.path / path
        follow, at = (0, None) if within is None else (os.O_NOFOLLOW, within._descriptor)
        with _named(self.path):
            if make and within is None:
                # Only the folder that a user names may be reached over links; below it each one is made by hand.
                self.path.mkdir(parents=True, exist_ok=True)
            elif make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, dir_fd=at)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | follow, dir_fd=at)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def names(self) -> list[str]:
        """What is in it."""
        return sorted(os.listdir(self._descriptor))

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Let the file ``name`` have this content, or what it had before."""
        self.rename(self.write_beside(name, pieces), name)

    def write_beside(self, name: str, pieces: Iterable[memoryview]) -> str:
        """Write a file with this content to the disk; its name, for ``rename``. Nothing is left of half a one."""
        partial, descriptor = self._create(name)
        try:
            with _named(self.path / name):
                for left in pieces:
                    while left:
                        left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
        except BaseException:
            self._drop(partial)
            raise
        finally:
            os.close(descriptor)
        return partial

    def rename(self, partial: str, name: str) -> None:
        """Give ``partial`` the name ``name`` for good; nothing is left of it if that cannot be."""
        try:
            with _named(self.path / name):
                os.replace(partial, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self._drop(partial)
            raise
        self.sync()

    def stream(self, name: str, begin: str = "") -> Stream:
        """A new file ``name`` that begins with these lines, to which more are written."""
        partial, descriptor = self._create(name)
        lines = Stream(self.path / name, descriptor)
        try:
            lines.write(begin)
        except BaseException:
            lines.close()
            self._drop(partial)
            raise
        self.rename(partial, name)
        return lines

    def extended(self, name: str) -> Stream:
        """The file ``name``, made if need be, to the end of which lines are written."""
        how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with _named(self.path / name):
            descriptor = os.open(name, how, 0o666, dir_fd=self._descriptor)
        _check_regular(self.path / name, descriptor)
        return Stream(self.path / name, descriptor)

    def remove(self, name: str) -> None:
        """Delete a file, or a link."""
        with _named(self.path / name):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_folder(self, name: str) -> None:
        """Delete an empty folder."""
        with _named(self.path / name):
            os.rmdir(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Force the names in it to the disk."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def _create(self, name: str) -> tuple[str, int]:
        partial = f"{name[:60]}.{secrets.token_hex(4)}{PARTIAL}"
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with _named(self.path / name):
            descriptor = os.open(partial, how, 0o666, dir_fd=self._descriptor)
            with contextlib.suppress(FileNotFoundError):
                # Whoever could read the file before can read the new one.
                before = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                if stat.S_ISREG(before.st_mode) and before.st_uid == os.geteuid():
                    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        return partial, descriptor

    def _drop(self, partial: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=self._descriptor)


class Stream:
    """A file of lines that is being written; each is with the system when ``write`` returns."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def write(self, text: str) -> None:
        """Add ``text``."""
        left = memoryview(text.encode())
        with _named(self.path):
            while left:
                left = left[os.write(self._descriptor, left) :]

    def fileno(self) -> int:
        """Its descriptor."""
        return self._descriptor

    def last_byte(self) -> bytes:
        """What the file ends with, if it has anything."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, 1, size - 1) if size else b""

    def sync(self) -> None:
        """Force it to the disk."""
        with _named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_file(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Let the file ``path`` have this content, or what it had before.

    A link of this name is replaced. What is no file, a pipe or a terminal such as /dev/stdout, is written to.

    Raises
    ------
    OSError
        That names ``path``, if it cannot be.
    """
    place, pieces = Path(path), [memoryview(content.encode() if isinstance(content, str) else content)]
    if _takes_a_stream(place):
        with _named(place):
            _send(place, pieces)
        return
    with _named(place):
        folder = Folder(place.parent)
    with folder:
        folder.write(place.name, pieces)


def write_picture(path: str | os.PathLike[str], figure: Any, dpi: int) -> None:
    """Write a figure of matplotlib, drawn in the format that the ending of ``path`` names, as :func:`write_file` does.

    Raises
    ------
    OSError
        That names ``path``, if it cannot be.
    """
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:], dpi=dpi)
    write_file(path, image.getbuffer())


@contextlib.contextmanager
def made_beside(path: Path) -> Iterator[Path]:
    """The path of a file for others to write, which becomes ``path`` at the end, or nothing if that fails.

    It is not there yet: whoever makes it must insist on that ("x"), or may follow a link.
    """
    with _named(path):
        folder = Folder(path.parent)
    with folder:
        partial = path.with_name(f"{path.name[:60]}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            yield partial
            with _named(path), open_regular(partial, follow_links=False) as written:
                os.fsync(written.fileno())
            folder.rename(partial.name, path.name)
        except BaseException:
            folder._drop(partial.name)
            raise


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """The file ``path`` opened for reading, at once: a pipe would be waited for, a device read for ever.

    Raises
    ------
    OSError
        That names ``path``, if it is no regular file, or cannot be opened.
    """
    # O_NONBLOCK: opening a pipe would wait for its other end before anybody could see that it is one.
    how = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    with _named(Path(path)):
        descriptor = os.open(path, how)
    _check_regular(Path(path), descriptor)
    return io.BufferedReader(_NamedFile(Path(path), descriptor))


class _NamedFile(io.FileIO):
    """A file whose read errors name its path. The system's own, such as an input/output error, do not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(descriptor, "rb")
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        with _named(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with _named(self._path):
            return super().readall()


def _check_regular(path: Path, descriptor: int) -> None:
    """Close the file if it is none, and say so. More than one name may be a way to a file elsewhere, as a link is."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file but a folder, a pipe or a device")


def _takes_a_stream(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    if stat.S_ISLNK(mode):
        # Others cannot put links there, and what they stand for may be a file that the shell has opened.
        parent = str(path.parent.resolve())
        return parent in _DESCRIPTORS or parent.endswith("/fd")
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _send(path: Path, pieces: Iterable[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(descriptor, True)
        for left in pieces:
            while left:
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an OSError name ``path``, whatever the system's call was about."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        linked = error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink()
        reason = "it is a link, and is not followed" if linked else os.strerror(error.errno)
        raise OSError(error.errno, reason, str(path)) from error
