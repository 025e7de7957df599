"""torch's distributed checkpoints (``torch.distributed.checkpoint``), written and read by one process."""

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


def _member(kind: object, name: str) -> object:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as calls of ``getattr``."""
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
    ("builtins", "getattr"): _member,
    **{("pathlib", name): PurePath for name in ("Path", "PosixPath", "WindowsPath")},
}
"""What metadata consist of, which are pickled; paths in them are of no use here."""


def write(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by name as such a checkpoint, a folder: whole, or not at all.

    Raises
    ------
    CheckpointError
        If something is there already.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists; name another folder")
    partial = path.with_name(f"{path.name[:60]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with _as_one_process():
            state_dict_saver.save(dict(state), checkpoint_id=partial, no_dist=True)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of such a checkpoint by name. Nothing in it is run.

    Raises
    ------
    CheckpointError
        If it is none, or damaged.
    """
    try:
        reader = _Reader(path)
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        with _as_one_process():
            state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    except (OSError, CheckpointError):
        raise
    except (Exception, CheckpointException) as error:  # whatever damaged metadata lead to
        cause = error.failures[0][0] if isinstance(error, CheckpointException) and 0 in error.failures else error
        reason = " ".join(f"{cause}".split())[:200]
        raise CheckpointError(f"{path} cannot be read as a distributed checkpoint: {reason}") from error
    return state


@contextmanager
def _as_one_process() -> Iterator[None]:
    with warnings.catch_warnings():  # that it is one is what is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


class _Metadata(pickle.Unpickler):
    """Reads what metadata consist of, and nothing that would run."""

    def find_class(self, module: str, name: str) -> Any:
        """One of those classes, or a dtype."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"metadata with {module}.{name} cannot be read without running code")
        return _ALLOWED[module, name]


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Those of the folder; files that they name lie in it."""
        with open_regular(Path(self.path) / METADATA, follow_links=False) as file:
            described = _Metadata(file).load()
        for name in {each.relative_path for each in described.storage_data.values()}:
            if Path(name).name != name:
                raise CheckpointError(f"{self.path}: {name!r} lies in another folder")
            open_regular(Path(self.path) / name, follow_links=False).close()
        described.storage_meta = metadata.StorageMeta()
        return described  # type: ignore[no-any-return]
