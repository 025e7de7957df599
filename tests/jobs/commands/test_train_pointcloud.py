"""``distconv train pointcloud``: what it refuses. Its declaration: test_training_jobs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv.pipeline import PipelinePlan
from tests.jobs.command_lines import assert_refused
from tests.jobs.images.image_files import written
from tests.jobs.pointcloud.cloud_files import write_ours

PLAN = PipelinePlan("resnet", batch=2, ranks=2, cuts=(), replicas=(1,), plans=({"n": 2},), schedule="gpipe")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--keep 0", "argument --keep: '0' is not a number above 0 and at most 1"),
        ("--keep 0.01", "--keep 0.01: no point is left of 30. Use a larger --keep or --points"),
        ("--resolution 2000000", "resolution=2000000: must be 1 to 1048576 voxels along each side"),
        ("--grid c=2", "axis c splits none of them. Use n, d, h, w"),
        ("--data nowhere.h5", "nowhere.h5"),
        ("--ppv 3", "--ppv: only an option of pipelines"),
        ("--pipeline gpipe --ppv 99 --drop-last", "a register must come after one of the layers 1 to"),
        ("--pipeline-plan plan.json", "its stages distribute layers, which a sparse network does not support"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: str, message: str
) -> None:
    written(comm, shared_tmp_path, lambda folder: [write_ours(folder / "clouds.h5"), PLAN.save(folder / "plan.json")])
    monkeypatch.chdir(shared_tmp_path)
    words = "train pointcloud --data clouds.h5 --width 2 --batch 2 --resolution 16 --points 30 --out out"
    assert_refused(capsys, [*words.split(), *arguments.split()], message, among_notes=True)
