"""``distconv plan pointcloud``: what it prints, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distconv import cli
from tests.jobs.command_lines import assert_refused

SMALL = ["--batch", "4", "--points", "64", "--width", "2", "--resolution", "16"]


def plan(*more: str) -> int:
    return cli.main(["plan", "pointcloud", *SMALL, "--machine", "localhost", *more])


def test_it_ranks_grids_and_says_how_to_train(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--ranks", "2") == 0
    printed = capsys.readouterr().out
    if comm.rank:
        assert not printed
        return
    rows = re.findall(r"^  (\S+) +([\d.]+) .*x$", printed, re.MULTILINE)
    assert {grid for grid, _ in rows} == {"n=2", "d=2", "h=2", "w=2"}
    times = [float(time) for _, time in rows]
    assert times == sorted(times)
    assert printed.splitlines()[-1] == (
        "train with it: mpiexec -n 2 distconv train pointcloud --model resnet --width 2 --batch 4 --resolution 16 "
        f"--points 64 --keep 1.0 --grid {rows[0][0]}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2", "--memory", "10kB"], "no grid of 2 ranks fits into 1e-05 GB per rank"),
        (["--ranks", "2", "--data", "nowhere.h5"], "nowhere.h5"),
    ],
)
def test_bad_input_is_one_line_on_rank_0(
    comm: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert_refused(capsys, ["plan", "pointcloud", *SMALL, "--machine", "localhost", *options], message)
