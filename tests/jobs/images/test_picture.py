"""The picture at the end of a classifier's training."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.images.picture import RESULT_FIGURE
from distconv.jobs.training import picture
from distconv.jobs.training.picture import ClassifiedExample
from tests.jobs.approved.figures import approve_figures


def test_images_of_any_channels_are_drawn_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "images")
    examples = [
        ClassifiedExample(np.arange(5 * 6 * channels).reshape(channels, 5, 6) % 23 - 4, 1, channels)
        for channels in (1, 2, 3)
    ]
    RESULT_FIGURE.draw("x.png", [*examples, ClassifiedExample(np.full((1, 2, 2), 3), 0, 0)], [], "title")
