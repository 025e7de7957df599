"""The picture at the end of a classifier's training."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def test_pictures_of_any_channels_can_be_drawn_without_metrics(tmp_path: Path) -> None:
    from distconv.jobs.images.picture import RESULT_FIGURE
    from distconv.jobs.training.picture import ClassifiedExample

    random = np.random.default_rng(0)
    examples = [ClassifiedExample(random.random((channels, 5, 6)), 1, channels) for channels in (1, 2, 3)]
    RESULT_FIGURE.draw(tmp_path / "x.png", [*examples, ClassifiedExample(np.zeros((1, 2, 2)), 0, 0)], [], "title")
    assert (tmp_path / "x.png").stat().st_size > 1000
