"""torch's distributed checkpoints (``torch.distributed.checkpoint``), written and read by a single process.

Metadata of such a checkpoint is pickled. It is read without running any code of the file.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distconv.errors import CheckpointError
from distconv.whole_files import PARTIAL, open_regular

METADATA = ".metadata"


def _format_member(kind: object, name: str) -> object:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``.

    The unpickler calls this function instead of ``getattr``, which could reach any object.
    """
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise CheckpointError("metadata with builtins.getattr cannot be read without running code")
    return metadata._MEM_FORMAT_ENCODING[name]


_ALLOWED = {
    **{
        (kind.__module__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.TensorProperties,
            metadata.ChunkStorageMetadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _format_member,
    **{("pathlib", name): PurePath for name in ("Path", "PosixPath", "WindowsPath")},
}
"""Classes and functions that pickled metadata may name, with the one that the unpickler uses for each.

A path becomes a PurePath, which cannot access files. Paths in metadata are not used.
"""


def write(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors as a distributed checkpoint: the folder appears complete, or not at all.

    Not collective: call on one rank.

    Parameters
    ----------
    state : mapping of str to Tensor
        Full tensors by name.
    path : Path
        The folder, which must not exist.

    Raises
    ------
    CheckpointError
        If ``path`` exists.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; name another folder")
    # A random name, so that two jobs do not write into one folder.
    partial = path.with_name(f"{path.name[:60]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with _without_warning():
            state_dict_saver.save(dict(state), checkpoint_id=partial, no_dist=True)
        partial.rename(path)
    # After a KeyboardInterrupt, too, no partial folder stays behind.
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(path: Path) -> Mapping[str, torch.Tensor]:
    """Read the tensors of a distributed checkpoint, without running code of its files.

    Parameters
    ----------
    path : Path
        The folder.

    Returns
    -------
    mapping of str to Tensor
        Full tensors by name. Entries that are not tensors are left out.

    Raises
    ------
    CheckpointError
        If ``path`` is not a distributed checkpoint, or is damaged.
    OSError
        If a file cannot be read.
    """
    try:
        reader = _Reader(path)
        entries = reader.read_metadata().state_dict_metadata
        # torch loads in place, into tensors of the recorded sizes.
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        with _without_warning():
            state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    except (OSError, CheckpointError):
        raise
    except (Exception, CheckpointException) as error:  # whatever damaged metadata lead to
        cause = error.failures[0][0] if isinstance(error, CheckpointException) and 0 in error.failures else error
        reason = " ".join(f"{cause}".split())[:200]
        raise CheckpointError(f"{path} cannot be read as a distributed checkpoint: {reason}") from error
    return state


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning that torch.distributed is not in use, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler for the classes of metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or a dtype."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"metadata with {module}.{name} cannot be read without running code")
        return _ALLOWED[module, name]


class _Reader(filesystem.FileSystemReader):
    """Reader of a checkpoint whose files all lie in its folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the metadata of the folder; raise if it names files elsewhere."""
        with open_regular(Path(self.path) / METADATA, follow_links=False) as file:
            described = _MetadataUnpickler(file).load()
        # A file name with a path could name any file that this user may read.
        for name in {each.relative_path for each in described.storage_data.values()}:
            if Path(name).name != name:
                raise CheckpointError(f"{self.path}: {name!r} lies in another folder")
            open_regular(Path(self.path) / name, follow_links=False).close()
        # The metadata may name a writer with settings of its own; none of them is used.
        described.storage_meta = metadata.StorageMeta()
        return described  # type: ignore[no-any-return]
