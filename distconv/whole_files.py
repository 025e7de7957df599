"""Atomic files: a file has its new content or its old one, even after a crash.

::

    1  a temporary file, with a random name, is written in the same folder
    2  it is forced to the disk
    3  it is renamed to the final name; a symbolic link of this name is replaced, not followed

The folder stays open during all steps, so that no step is redirected if someone replaces the folder by a link. All
writers of files in distconv use this module.
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
"""Suffix of temporary files."""

_DESCRIPTORS = ("/dev", "/proc")
"""Folders with names for open files of the process, such as /dev/stdout."""


class Folder:
    """An open folder. Names are resolved in the folder itself, and links in it are not followed.

    Its methods raise an OSError with the path of the file if an operation fails.

    Parameters
    ----------
    path : str or path-like
        The folder. Links in this path are followed, because the user named it, unless ``within`` is given.
    make : bool
        Create the folder, with its parents, if it does not exist. Otherwise it must exist.
    within : Folder, optional
        The folder that contains this one; ``path`` is then a name in it.
    """

    path: Path
    _descriptor: int

    def __init__(self, path: str | os.PathLike[str], *, make: bool = False, within: Folder | None = None) -> None:
        self.path = Path(path) if within is None else within.path / path
        follow, at = (0, None) if within is None else (os.O_NOFOLLOW, within._descriptor)
        with _path_in_errors(self.path):
            if make and within is None:
                # mkdir(parents=True) follows links, which only the path that the user named may contain.
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
        """Return the sorted names of the entries."""
        return sorted(os.listdir(self._descriptor))

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Replace the file ``name`` atomically.

        Parameters
        ----------
        name : str
            Name of a file in this folder.
        pieces : iterable of memoryview
            The content in pieces, which are concatenated.
        """
        self.rename(self.write_temporary(name, pieces), name)

    def write_temporary(self, name: str, pieces: Iterable[memoryview]) -> str:
        """Write a temporary file and force it to the disk; delete it on failure.

        Parameters
        ----------
        name, pieces
            As in :meth:`write`.

        Returns
        -------
        str
            The name of the temporary file, for :meth:`rename`.
        """
        partial, descriptor = self._create(name)
        try:
            with _path_in_errors(self.path / name):
                for remaining in pieces:
                    while remaining:
                        # The system may write less than it was given.
                        remaining = remaining[os.write(descriptor, remaining) :]
                # Before the rename: after a crash the name could otherwise lead to a file without content.
                os.fsync(descriptor)
        except BaseException:
            self._remove_if_present(partial)
            raise
        finally:
            os.close(descriptor)
        return partial

    def rename(self, partial: str, name: str) -> None:
        """Rename the temporary file ``partial`` to ``name`` and force the change to the disk; delete it on failure.

        Parameters
        ----------
        partial : str
            Name of the temporary file.
        name : str
            Final name of the file.
        """
        try:
            with _path_in_errors(self.path / name):
                os.replace(partial, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self._remove_if_present(partial)
            raise
        self.sync()

    def create_stream(self, name: str, begin: str = "") -> Stream:
        """Create the file ``name``, which replaces an existing one, for writing line by line.

        Parameters
        ----------
        name : str
            Name of a file in this folder.
        begin : str
            The first lines. The file appears under its name with these lines.

        Returns
        -------
        Stream
        """
        partial, descriptor = self._create(name)
        lines = Stream(self.path / name, descriptor)
        try:
            lines.write(begin)
        except BaseException:
            lines.close()
            self._remove_if_present(partial)
            raise
        # Other processes see the file from its first line on.
        self.rename(partial, name)
        return lines

    def open_append(self, name: str) -> Stream:
        """Open the file ``name`` for appending lines; create it if it does not exist.

        Parameters
        ----------
        name : str
            Name of a file in this folder.

        Returns
        -------
        Stream
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with _path_in_errors(self.path / name):
            descriptor = os.open(name, flags, 0o666, dir_fd=self._descriptor)
        _check_regular(self.path / name, descriptor)
        return Stream(self.path / name, descriptor)

    def remove(self, name: str) -> None:
        """Delete a file or a link.

        Parameters
        ----------
        name : str
            Name in this folder.
        """
        with _path_in_errors(self.path / name):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_folder(self, name: str) -> None:
        """Delete an empty folder.

        Parameters
        ----------
        name : str
            Name in this folder.
        """
        with _path_in_errors(self.path / name):
            os.rmdir(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Force the names of the entries to the disk."""
        with _path_in_errors(self.path):
            os.fsync(self._descriptor)

    def _create(self, name: str) -> tuple[str, int]:
        # Shortened, since file systems limit the length of a name; random, since several processes may write the file.
        partial = f"{name[:60]}.{secrets.token_hex(4)}{PARTIAL}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with _path_in_errors(self.path / name):
            descriptor = os.open(partial, flags, 0o666, dir_fd=self._descriptor)
            with contextlib.suppress(FileNotFoundError):
                # Keep the permissions of the file that is replaced.
                previous = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                # Another user's permissions might give access that this user does not intend.
                if stat.S_ISREG(previous.st_mode) and previous.st_uid == os.geteuid():
                    os.fchmod(descriptor, stat.S_IMODE(previous.st_mode))
        return partial, descriptor

    def _remove_if_present(self, partial: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=self._descriptor)


class Stream:
    """A file of lines that is being written, without a buffer in this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    def write(self, text: str) -> None:
        """Append ``text``; the operating system has it on return.

        Parameters
        ----------
        text : str
            Text with its line end.
        """
        remaining = memoryview(text.encode())
        with _path_in_errors(self.path):
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def last_byte(self) -> bytes:
        """Return the last byte of the file, or nothing if the file is empty."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, 1, size - 1) if size else b""

    def sync(self) -> None:
        """Force the file to the disk."""
        with _path_in_errors(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_file(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Replace a file atomically.

    A symbolic link at ``path`` is replaced. A pipe, a device or a terminal, such as /dev/stdout, is written to.

    Parameters
    ----------
    path : str or path-like
        Path of the file.
    content : str or bytes or memoryview
        The content; a string is encoded as UTF-8.

    Raises
    ------
    OSError
        With ``path``, if the file cannot be written.
    """
    place, pieces = Path(path), [memoryview(content.encode() if isinstance(content, str) else content)]
    if _is_pipe_or_device(place):
        with _path_in_errors(place):
            _write_to_stream(place, pieces)
        return
    with _path_in_errors(place):
        folder = Folder(place.parent)
    with folder:
        folder.write(place.name, pieces)


def write_picture(path: str | os.PathLike[str], figure: Any, dpi: int) -> None:
    """Write a matplotlib figure to a file, as :func:`write_file` does.

    Parameters
    ----------
    path : str or path-like
        The file; its suffix selects the format.
    figure : matplotlib.figure.Figure
        Figure of matplotlib.
    dpi : int
        Resolution in dots per inch.

    Raises
    ------
    OSError
        With ``path``, if the file cannot be written.
    """
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:], dpi=dpi)
    write_file(path, image.getbuffer())


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a library to write to; rename it to ``path`` at the end of the block.

    If the block fails, the temporary file is deleted and ``path`` is unchanged.

    Parameters
    ----------
    path : Path
        The final path.

    Yields
    ------
    Path
        A path that does not exist. Open it exclusively (mode "x"), otherwise a link of this name would be followed.

    Raises
    ------
    OSError
        With ``path``, if the file cannot be written.
    """
    with _path_in_errors(path):
        folder = Folder(path.parent)
    with folder:
        partial = path.with_name(f"{path.name[:60]}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            yield partial
            with _path_in_errors(path), open_regular(partial, follow_links=False) as written:
                os.fsync(written.fileno())
            folder.rename(partial.name, path.name)
        except BaseException:
            folder._remove_if_present(partial.name)
            raise


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading, without waiting: a pipe could block, and a device could be read without end.

    Parameters
    ----------
    path : str or path-like
        Path of the file.
    follow_links : bool
        Follow a symbolic link at ``path``. Otherwise raise.

    Returns
    -------
    BinaryIO
        A buffered reader.

    Raises
    ------
    OSError
        With ``path``, if it is not a regular file or cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end before the type of the file can be checked.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    with _path_in_errors(Path(path)):
        descriptor = os.open(path, flags)
    _check_regular(Path(path), descriptor)
    return io.BufferedReader(_NamedFile(Path(path), descriptor), os.fstat(descriptor).st_blksize)


class _NamedFile(io.FileIO):
    """A file whose read errors contain its path. Those of the system, such as an input/output error, do not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(descriptor, "rb")
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        with _path_in_errors(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with _path_in_errors(self._path):
            return super().readall()


def _check_regular(path: Path, descriptor: int) -> None:
    """Raise an OSError, and close the file, unless it is a regular file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file but a folder, a pipe or a device")


def _is_pipe_or_device(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    if stat.S_ISLNK(mode):
        # The system makes these links. They stand for files that the process, or its shell, has open.
        parent = str(path.parent.resolve())
        return parent in _DESCRIPTORS or parent.endswith("/fd")
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write_to_stream(path: Path, pieces: Iterable[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        # Only the opening must not wait.
        os.set_blocking(descriptor, True)
        for remaining in pieces:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Set the path of an OSError to ``path``, whatever path the system call had."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        linked = error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink()
        reason = "it is a symbolic link, which is not followed" if linked else os.strerror(error.errno)
        raise OSError(error.errno, reason, str(path)) from error
