"""The picture at the end of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distconv.jobs.segmentation.picture import SegmentationExample, draw

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 1.0},
    {"step": 2, "loss": 0.5},
    {"step": 2, "evaluation": "test", "loss": 0.6, "mean_dice": 0.5, "mean_iou": 0.4},
    {"step": 2, "evaluation": "test", "loss": 0.6, "mean_dice": None, "mean_iou": None},
]


@pytest.mark.parametrize("ignore", [None, 2])
def test_a_picture_is_drawn_without_warnings(tmp_path: Path, ignore: int | None) -> None:
    maps = np.random.default_rng(0).integers(0, 3, (3, 8, 12))
    draw(
        tmp_path / "x.png", [SegmentationExample("sample 0", *maps)] * 2, LINES, classes=2, ignore=ignore, title="title"
    )
    assert (tmp_path / "x.png").stat().st_size > 10000
