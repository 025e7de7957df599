"""The picture of a training on point clouds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distconv.jobs.pointcloud.classification.picture import RESULT_FIGURE
from distconv.jobs.training.picture import ClassifiedExample


def test_it_is_drawn_with_and_without_held_out_clouds(tmp_path: Path) -> None:
    points = np.random.default_rng(0).random((20, 3)).astype(np.float32)
    examples = [ClassifiedExample(points, "box", "box"), *[ClassifiedExample(points, "box", "cone")] * 4]
    steps = [{"step": step, "loss": 1.0 / step} for step in (1, 2)]
    evaluation = {"step": 2, "evaluation": "test", "accuracy": 0.5, "loss": 0.7}
    for name, lines in (("with", [*steps, evaluation]), ("without", steps)):
        RESULT_FIGURE.draw(tmp_path / f"{name}.png", examples, lines, "a title")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
