"""``distconv data mesh``: the file it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest

from distconv import cli
from distconv.jobs.commands import make_mesh
from tests.jobs.command_lines import assert_refused

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


@pytest.mark.ranks(1, 2)
def test_it_makes_the_folder_writes_the_file_and_says_what_is_in_it(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shared_tmp_path / "new" / "mesh.h5"
    options = ["--size", "32", "--samples", "2", "--heldout", "1", "--tau", "0.05", "--seed", "3", "--out", str(path)]
    assert cli.main(["data", "mesh", *options]) == 0
    printed, progress = capsys.readouterr()
    picture = path.with_suffix(".png")
    assert (f"figure of the first sample: {picture}" in progress) == (comm.rank == 0 and picture.exists())
    if comm.size == 1:
        assert picture.read_bytes()[:4] == b"\x89PNG"
    assert (f"{path}: 2 training and 1 held-out samples of 32 x 32 cells" in printed) == (comm.rank == 0)
    with h5py.File(path, "r", locking=False) as file:
        assert (len(file["train/input"]), len(file["heldout/input"])) == (2, 1)
        assert (file.attrs["tau"], file["train/seed"][0]) == (0.05, 3)


@pytest.mark.ranks(1)
def test_a_picture_of_the_first_sample_that_cannot_be_written_does_not_end_the_job(
    comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(make_mesh, "draw_sample", full)
    options = ["--size", "32", "--samples", "1", "--heldout", "0", "--tau", "0.05", "--out", str(tmp_path / "mesh.h5")]
    assert cli.main(["data", "mesh", *options]) == 0
    assert "no figure of the first sample: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "mesh.h5").exists()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["mesh.h5", "mesh.png"])
def test_the_picture_of_the_first_sample_replaces_no_file(comm: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "mesh.png").write_text("mine") if name == "mesh.h5" else None
    options = ["--size", "32", "--samples", "1", "--heldout", "0", "--tau", "0.05", "--out", str(tmp_path / name)]
    assert cli.main(["data", "mesh", *options]) == 0
    assert h5py.is_hdf5(tmp_path / name)
    assert name == "mesh.png" or (tmp_path / "mesh.png").read_text() == "mine"


@pytest.mark.ranks(1, 2)
def test_steps_are_only_measured_if_asked_for(comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "mesh", "--size", "16", "--measure-steps", "1", "--out", str(tmp_path / "x.h5")]) == 0
    assert ("16 x 16 cells, 1 steps measured" in capsys.readouterr().out) == (comm.rank == 0)
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure-steps", "0"], "--measure-steps 0 --size 128: at least 1 step and 16 cells are required"),
        (["--size", "8", "--measure-steps", "2"], "--measure-steps 2 --size 8: at least 1 step"),
        (["--size", "8", "--out", "x.h5"], "size 8: a mesh needs at least 16 cells"),
        (["--out", "/dev/null/x.h5"], "/dev/null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_made_is_one_line_and_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert_refused(capsys, ["data", "mesh", *options], message)
