"""torch's distributed checkpoints: torch reads what is written; what would run code or lies elsewhere is refused."""

from __future__ import annotations

import os
import pickle
import warnings
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from distconv.errors import CheckpointError
from distconv.parameters.distributed_checkpoint import METADATA, read, write

STATE = {"a.weight": torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7, "n": torch.tensor(3)}


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    write(STATE, tmp_path / "a")
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    with pytest.raises(CheckpointError, match="exists; name another folder"):
        write(STATE, tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**STATE, "epoch": 3}, checkpoint_id=tmp_path / "a", no_dist=True)
    found = read(tmp_path / "a")
    assert found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("by_getattr", [True, False])
def test_members_of_enumerations_are_read_as_any_python_writes_them(tmp_path: Path, monkeypatch, by_getattr) -> None:
    def reduced(self: Enum, protocol: int) -> tuple[object, ...]:
        return (getattr, (type(self), self.name)) if by_getattr else (type(self), (self.value,))

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    write(STATE, tmp_path / "a")
    assert (b"getattr" in (tmp_path / "a" / METADATA).read_bytes()) == by_getattr
    assert torch.equal(read(tmp_path / "a")["a.weight"], STATE["a.weight"])


class Bomb:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        return self.call[0], self.call[1:]


def test_what_is_none_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    for name, content in {
        "bomb": pickle.dumps(Bomb(os.mkdir, str(tmp_path / "exploded"))),
        "attribute bomb": pickle.dumps(Bomb(getattr, torch.Size, "numel")),
        "list": pickle.dumps([1]),
        "text": b"x",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).write_bytes(content)
        with pytest.raises(CheckpointError, match="without running code" if "bomb" in name else "cannot be read as"):
            read(tmp_path / name)
    with pytest.raises(OSError, match="No such file"):
        read(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_metadata_lie_in_the_folder(tmp_path: Path) -> None:
    write(STATE, tmp_path / "a")
    path = tmp_path / "a" / METADATA
    path.rename(tmp_path / "metadata")
    path.symlink_to(tmp_path / "metadata")
    with pytest.raises(OSError, match="it is a symbolic link"):
        read(tmp_path / "a")


@pytest.mark.parametrize("change", ["link", "elsewhere"])
def test_files_lie_in_the_folder(tmp_path: Path, change: str) -> None:
    write(STATE, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    data.rename(tmp_path / data.name)
    if change == "link":
        data.symlink_to(tmp_path / data.name)
        with pytest.raises(OSError, match="it is a symbolic link"):
            read(tmp_path / "a")
        return
    path = tmp_path / "a" / METADATA
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../0_0.distc"))
    with pytest.raises(CheckpointError, match="lies in another folder"):
        read(tmp_path / "a")


def test_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    write(STATE, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read as a distributed checkpoint"):
        read(tmp_path / "a")
