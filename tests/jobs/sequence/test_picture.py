"""The picture at the end of a training on sequences."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.sequence.picture import RESULT_FIGURE
from distconv.jobs.training.picture import ClassifiedExample

LINES = [{"step": 1, "loss": 2.0}, {"step": 1, "evaluation": "test", "loss": 1.0, "accuracy": 0.5}]


@pytest.mark.parametrize("shape", [(60, 1), (3, 1), (9, 4), (1, 4)])
def test_bits_and_coefficients_are_drawn(tmp_path, shape):
    values = np.ones(shape, np.float32)
    RESULT_FIGURE.draw(
        tmp_path / "a.png",
        [ClassifiedExample(values, "a", "a"), *[ClassifiedExample(values, "a", "b")] * 5],
        LINES,
        "title",
    )
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
