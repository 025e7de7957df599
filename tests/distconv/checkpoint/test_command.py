"""``distconv checkpoint`` lists, verifies and exports what a run has saved."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv import checkpoint, cli
from tests.distconv.checkpoint.damage import on_rank_0, only_file

pytestmark = pytest.mark.ranks(1, 2)


def saved(comm: Any, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in (1, 2):
        dc.save_checkpoint(folder / "checkpoints", step, model, optimizer, {"loss": 0.25}, comm=comm)
    comm.Barrier()
    return model


def printed(comm: Any, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> list[str]:
    assert cli.main(["checkpoint", *words]) == code
    lines = capsys.readouterr().out.splitlines()
    assert comm.rank == 0 or not lines
    return lines


def test_what_is_there_is_listed(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(comm, shared_tmp_path)
    lines = printed(comm, capsys, 0, "info", str(shared_tmp_path))
    if comm.rank == 0:
        steps = [line for line in lines if not line.startswith(" ")]
        assert [line.partition(": ")[2] for line in steps] == [
            f"step {step}, 7 tensors of a model and 1 more, 0.0 MiB in 1 files" for step in (1, 2)
        ]
        assert lines.count("  user: {'loss': 0.25}") == 2


def test_what_is_damaged_is_named_and_code_1(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(comm, shared_tmp_path)
    assert all(line.endswith(", intact") for line in printed(comm, capsys, 0, "verify", str(shared_tmp_path)))
    path = only_file(shared_tmp_path / "checkpoints" / "step-000001")
    comm.Barrier()
    on_rank_0(comm, lambda: path.write_bytes(path.read_bytes()[:-1] + b"x"))
    lines = printed(comm, capsys, 1, "verify", str(shared_tmp_path))
    if comm.rank == 0:
        assert "step-000001 is damaged" in lines[0]
        assert lines[1].endswith(", intact")


def test_weights_are_exported_for_torch(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(comm, shared_tmp_path)
    out = shared_tmp_path / "weights.pt"
    printed(comm, capsys, 0, "export", str(shared_tmp_path), "--out", str(out))
    comm.Barrier()
    found = torch.load(out, weights_only=True, map_location=torch.get_default_device())
    assert list(found) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)


@pytest.mark.fault(58)
def test_an_export_to_a_full_disk_names_the_file_and_leaves_what_was_there(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(comm, shared_tmp_path)
    out = shared_tmp_path / "weights.pt"
    on_rank_0(comm, lambda: out.write_text("good"))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert cli.main(["checkpoint", "export", str(shared_tmp_path), "--out", str(out)]) == 2
    assert f"No space left on device: '{out}'" in capsys.readouterr().err or comm.rank
    assert out.read_text() == "good"
    assert not list(shared_tmp_path.glob("*.partial"))


def test_a_folder_without_any_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoint", "info", str(shared_tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "there is no finished checkpoint in" in error or comm.rank


def test_texts_of_others_move_no_cursor(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(shared_tmp_path, 1, {"x": torch.ones(1)}, {"\x1b[2J": "\ud800"}, comm)
    comm.Barrier()
    lines = printed(comm, capsys, 0, "info", str(shared_tmp_path))
    assert comm.rank or lines[-1] == r"  '\x1b[2J': '\ud800'"
