"""The picture at the end of a training on sequences."""

from __future__ import annotations

import numpy as np

from distconv.jobs.sequence.picture import RESULT_FIGURE
from distconv.jobs.training import picture
from distconv.jobs.training.picture import ClassifiedExample
from tests.jobs.approved.figures import approve_figures


def test_bits_and_coefficients_are_drawn_as_approved(monkeypatch):
    approve_figures(monkeypatch, picture, "sequence")
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "evaluation": "test", "loss": 1.0, "accuracy": 0.5}]
    values = [
        np.arange(rows * columns).reshape(rows, columns) % 7 for rows, columns in ((60, 1), (3, 1), (4, 3), (1, 4))
    ]
    RESULT_FIGURE.draw("a.png", [ClassifiedExample(each, "a", "ab"[len(each) % 2]) for each in values], lines, "title")
