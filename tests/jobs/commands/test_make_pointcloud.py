"""``distconv data pointcloud``: the file it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.communication.agreement import try_on_rank_0
from distconv.errors import DistconvError
from distconv.jobs.pointcloud.datasets import PointClouds
from tests.jobs.command_lines import assert_refused
from tests.jobs.pointcloud.cloud_files import write_modelnet

COMMAND = ["data", "pointcloud"]


@pytest.mark.ranks(1, 2)
def test_shapes_are_written_once(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared_tmp_path / "new" / "shapes.h5"
    options = ["--samples", "12", "--points", "40", "--seed", "3", "--out", str(path)]
    for ending in ("s)", "(exists already)"):
        assert cli.main([*COMMAND, *options]) == 0
        printed = capsys.readouterr().out
        if comm.rank == 0:
            assert printed.startswith(f"{path}: shapes (12 train, 2 test), 40 points each, seed 3 (")
            assert printed.endswith(f"{ending}\n")
        else:
            assert printed == ""
    clouds = PointClouds(path, comm)
    assert {name: (len(group.labels), group.points) for name, group in clouds.groups.items()} == {
        "train": (12, 40),
        "test": (2, 40),
    }
    clouds.close()


@pytest.mark.ranks(1, 2)
def test_meshes_are_converted_and_shapes_need_no_test_group(comm: Any, shared_tmp_path: Path) -> None:
    try_on_rank_0(comm, lambda: write_modelnet(shared_tmp_path / "meshes"), DistconvError)
    made = {
        "meshes": ["--off", str(shared_tmp_path / "meshes"), "--points", "25"],
        "shapes": ["--samples", "3", "--heldout", "0", "--points", "25"],
    }
    counts = {}
    for name, options in made.items():
        assert cli.main([*COMMAND, *options, "--out", str(shared_tmp_path / f"{name}.h5")]) == 0
        clouds = PointClouds(shared_tmp_path / f"{name}.h5", comm)
        counts[name] = {group: len(found.labels) for group, found in clouds.groups.items()}
        clouds.close()
    assert counts == {"meshes": {"train": 4, "test": 2}, "shapes": {"train": 3}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out: missing. Name the file"),
        (["--samples", "0", "--out", "x.h5"], "--samples 0 --heldout 0 --points 16384 --seed 0: at least 1"),
        (["--points", "0", "--out", "x.h5"], "--samples 1000 --heldout 200 --points 0 "),
        (["--seed", "-1", "--out", "x.h5"], "--seed -1: at least 1 training cloud and 1 point are required"),
        (["--off", "/nowhere", "--out", "x.h5"], "No such file or directory: '/nowhere'"),
        (["--samples", "2", "--points", "9", "--out", "/dev/null/x.h5"], "/dev/null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_made_is_one_line_and_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert_refused(capsys, [*COMMAND, *options], message)
