"""Files of weights: torch's and safetensors give the same tensors; what would run code is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.errors import CheckpointError
from distconv.parameters.weight_files import load_weights, read_weights, write_weights

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


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "_orig_mod.module."])
def test_an_added_prefix_of_all_names_is_one_message(comm: Any, shared_tmp_path: Path, prefix: str) -> None:
    saved, model = nets()
    if comm.rank == 0:
        state = {f"{prefix}{name}": x for name, x in saved.state_dict().items()}
        torch.save({**state, "criterion.weight": torch.ones(2)}, shared_tmp_path / "a.pt")
    comm.Barrier()
    with pytest.raises(
        CheckpointError, match=f"a.pt: the weights do not fit the model: their names begin with '{prefix}'"
    ):
        load_weights(model, shared_tmp_path / "a.pt", comm)
    wrapped = nn.Module()
    wrapped.add_module("module", saved)
    dc.save_checkpoint(shared_tmp_path / "run", 1, wrapped, comm=comm)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 does not fit: their names begin with 'module\.'"):
        dc.load_checkpoint(shared_tmp_path / "run", model, comm=comm)


def test_checkpoints_of_other_trainers_say_where_their_weights_are(comm: Any, shared_tmp_path: Path) -> None:
    saved, model = nets()
    state = saved.state_dict()
    others = {"optimizer_state": {"state": {}}, "current_epoch": 3, "network_weights": state}
    if comm.rank == 0:
        torch.save(others, shared_tmp_path / "plain.pth")
        torch.save({**others, "logging": {"loss": [np.float64(1)]}}, shared_tmp_path / "nnunet.pth")
    comm.Barrier()
    with pytest.raises(CheckpointError, match=r"without running code: .*weights_only=False\)\['network_weights'\]"):
        load_weights(model, shared_tmp_path / "nnunet.pth", comm)
    with pytest.raises(CheckpointError, match=r"Its 'network_weights' is one. If you trust .*\['network_weights'\]"):
        load_weights(model, shared_tmp_path / "plain.pth", comm)
    if comm.rank == 0:  # as the error says
        content = torch.load(shared_tmp_path / "nnunet.pth", weights_only=False)
        torch.save(content["network_weights"], shared_tmp_path / "weights.pt")
    comm.Barrier()
    load_weights(model, shared_tmp_path / "weights.pt", comm)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in state.items())


def test_a_file_of_weights_is_no_folder_of_checkpoints(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        torch.save(nets()[0].state_dict(), shared_tmp_path / "a.pt")
    comm.Barrier()
    with pytest.raises(CheckpointError, match=r"it is a file. Load weights of torch by model.load_state_dict"):
        dc.load_checkpoint(shared_tmp_path / "a.pt", nets()[1], comm=comm)


def test_extra_state_is_kept_where_it_has_a_place(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2), "a._extra_state": {"count": 3}}
    write_weights(state, tmp_path / "a.pt")
    found = read_weights(tmp_path / "a.pt", MPI.COMM_SELF)
    assert found["a._extra_state"] == {"count": 3} and torch.equal(found["a.weight"], torch.ones(2))
    for name in ("a.safetensors", "folder"):
        with pytest.raises(CheckpointError, match=r"'a._extra_state', .* is not a tensor. Write a .pt file"):
            write_weights(state, tmp_path / name)
