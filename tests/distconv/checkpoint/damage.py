"""Saved values of the tests of checkpoints, and damage to their files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv.checkpoint.manifest import MANIFEST
from distconv.errors import CheckpointError
from tests.distconv.data.sample_files import common

VALUES = {"epoch": 3, "lr": 0.1 + 0.2, "nested": {"name": "mesh", "list": [1, 2]}}


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "model/weight": torch.randn(3, 4, dtype=torch.float64, generator=random),
        "model/half": torch.randn(5, generator=random).to(torch.bfloat16),
        "model/byte": torch.randn(5, generator=random).to(torch.float8_e4m3fn),
        "model/count": torch.tensor(7),
        "model/empty": torch.empty(0, 2),
        "model/columns": torch.randn(4, 3, generator=random).t(),
        "random/torch": torch.arange(9, dtype=torch.uint8),
    }


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.h5")
    return path


def refused(comm: Any, act: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    return common(comm, caught.value)


def on_rank_0(comm: Any, act: Callable[[], Any]) -> None:
    if comm.rank == 0:
        act()
    comm.Barrier()


def rewritten(folder: Path, **changed: Any) -> None:
    """Change the manifest and give it a right checksum, as somebody who means harm would."""
    resigned(folder, json.loads((folder / MANIFEST).read_text()) | changed)


def resigned(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with a right checksum."""
    unsigned = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**unsigned, "sha256": digest}))


@contextlib.contextmanager
def warned(comm: Any, pattern: str) -> Iterator[None]:
    """Rank 0 warns of it, and no other."""
    with pytest.warns(UserWarning, match=pattern) if comm.rank == 0 else contextlib.nullcontext():
        yield
