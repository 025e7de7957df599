"""Files of weights: torch's and safetensors give the same tensors; what would run code is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distconv.errors import CheckpointError
from distconv.parameters.weight_files import read_weights, write_weights

pytestmark = pytest.mark.ranks(1, 2)


def test_both_kinds_of_file_hold_the_same(comm: Any, shared_tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    state = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).state_dict()
    if comm.rank == 0:
        torch.save(state, shared_tmp_path / "a.pt")
        torch.save({"state_dict": state, "epoch": 3}, shared_tmp_path / "b.pt")
        save_file(state, shared_tmp_path / "c.safetensors")
    comm.Barrier()
    for name in ("a.pt", "b.pt", "c.safetensors"):
        found = read_weights(shared_tmp_path / name, comm)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def test_what_is_none_is_refused_on_all_ranks_and_runs_nothing(comm: Any, shared_tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(shared_tmp_path / "exploded"),)

    if comm.rank == 0:
        torch.save({"a": Bomb()}, shared_tmp_path / "bomb.pt")
        torch.save([1, 2], shared_tmp_path / "list.pt")
        (shared_tmp_path / "text.pt").write_text("no weights")
        (shared_tmp_path / "text.safetensors").write_text("no weights at all")
    comm.Barrier()
    for name, reason in {
        "bomb.pt": "without running code",
        "list.pt": "holds list; it must be a state_dict",
        "text.pt": "without running code",
        "text.safetensors": "cannot be read as safetensors|safetensors is not installed",
        "none.pt": "No such file",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            read_weights(shared_tmp_path / name, comm)
    assert not (shared_tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["a.pt", "b.safetensors", "c"])
def test_weights_are_read_back_as_they_were(comm: Any, shared_tmp_path: Path, name: str) -> None:
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    torch.manual_seed(1)
    state = {"a.b": torch.randn(3, 4), "n": torch.tensor(7), "half": torch.randn(5, dtype=torch.bfloat16)}
    state["turned"] = state["a.b"].t()
    if comm.rank == 0:
        write_weights(state, shared_tmp_path / name)
    comm.Barrier()
    found = read_weights(shared_tmp_path / name, comm)
    assert found.keys() == state.keys()
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in state.items())
    assert [each.name for each in shared_tmp_path.iterdir()] == [name]
