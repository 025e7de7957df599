"""The picture at the end of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distconv.jobs.segmentation import picture
from distconv.jobs.segmentation.picture import SegmentationExample, draw
from tests.jobs.approved.figures import approve_figures

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 1.0},
    {"step": 2, "loss": 0.5},
    {"step": 2, "evaluation": "test", "loss": 0.6, "mean_dice": 0.5, "mean_iou": 0.4},
    {"step": 2, "evaluation": "test", "loss": 0.6, "mean_dice": None, "mean_iou": None},
]


def test_figures_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "segmentation")
    maps = np.arange(3 * 2 * 4).reshape(3, 2, 4) % np.array([9, 3, 2])[:, None, None]
    examples = [SegmentationExample(f"sample {number}", *np.roll(maps, number, 2)) for number in (0, 1)]
    draw("x.png", examples, LINES, classes=3, ignore=2, title="title")
    draw("y.png", examples[:1], LINES[:1], classes=1, ignore=None, title="no scores")
