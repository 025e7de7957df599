"""The picture of a training on point clouds."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.pointcloud.classification.picture import RESULT_FIGURE
from distconv.jobs.training import picture
from distconv.jobs.training.picture import ClassifiedExample
from tests.jobs.approved.figures import approve_figures


def test_figures_with_and_without_held_out_clouds_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "pointcloud")
    points = np.arange(12.0, dtype=np.float32).reshape(4, 3) ** 2
    examples = [ClassifiedExample(points, "box", "box"), *[ClassifiedExample(points, "box", "cone")] * 4]
    steps = [{"step": step, "loss": 1.0 / step} for step in (1, 2)]
    evaluation = {"step": 2, "evaluation": "test", "accuracy": 0.5, "loss": 0.7}
    RESULT_FIGURE.draw("x.png", examples, [*steps, evaluation], "a title")
    RESULT_FIGURE.draw("y.png", examples[:1], steps, "not evaluated")
