"""The picture of a training: which lines of metrics.jsonl it shows in which unit, its examples and their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distconv.jobs.training import picture
from distconv.jobs.training.picture import ClassifiedExample, ResultFigure
from tests.jobs.approved.figures import approve_figures

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 0.9},
    {"step": 2, "loss": 0.8},
    {"step": 2, "evaluation": "test", "loss": 0.75, "accuracy": 0.25},
    {"step": 3, "loss": 0.6},
    {"step": 3, "evaluation": "train", "loss": 0.5, "accuracy": 0.75},
    {"step": 3, "evaluation": "test", "loss": 0.7, "accuracy": 0.5},
]


def test_the_figure_is_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "training")
    figure = ResultFigure(4, row_inches=1.5, curves=1.25, show=lambda axis, values: axis.plot(values, values * 3))
    examples = [ClassifiedExample(np.arange(number), 3, 3 + number % 2) for number in range(1, 6)]
    figure.draw("x.png", examples, LINES, "a title")
