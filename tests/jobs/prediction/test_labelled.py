"""Whose samples are opened as for training. The predictions themselves: tests/jobs/commands/test_predict.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv.jobs.prediction.labelled import is_labelled
from distconv.jobs.prediction.network import TrainedNetwork


@pytest.mark.parametrize(
    ("task", "data", "labelled"),
    [
        ("pointcloud", "clouds.h5", True),
        ("sequence", "embedded", True),
        ("classify", "digits", True),
        ("classify", "mnist", True),
        ("classify", "images.h5", False),
        ("classify", "images.nc", False),
        ("mesh", "mesh.h5", False),
        ("", "ct.zarr", False),
    ],
)
def test_arrays_are_read_box_by_box(tmp_path: Path, task: str, data: str, labelled: bool) -> None:
    (tmp_path / "mnist").mkdir()
    path = tmp_path / data if data == "mnist" else Path(data)
    assert is_labelled(TrainedNetwork(path, task, {}, {}, ""), path) == labelled
