"""The picture of a training: which lines of metrics.jsonl it shows in which unit, its examples and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from distconv.jobs.training.picture import ClassifiedExample, ResultFigure, draw_accuracies, draw_losses, name_example

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 0.9},
    {"step": 2, "loss": 0.8},
    {"step": 2, "evaluation": "test", "loss": 0.75, "accuracy": 0.25},
    {"step": 3, "loss": 0.6},
    {"step": 3, "evaluation": "train", "loss": 0.5, "accuracy": 0.75},
    {"step": 3, "evaluation": "test", "loss": 0.7, "accuracy": 0.5},
]


def drawn(axis: Any) -> dict[str, list[tuple[float, float]]]:
    """Points by the label of their line; those without one are called so."""
    return {
        "unnamed" if str(line.get_label()).startswith("_") else str(line.get_label()): list(
            zip(line.get_xdata(), line.get_ydata(), strict=True)
        )
        for line in axis.lines
    }


def test_losses_of_steps_and_of_evaluations_are_apart() -> None:
    axis = Figure().add_subplot()
    draw_losses(axis, LINES)
    assert drawn(axis) == {
        "unnamed": [(1, 0.9), (2, 0.8), (3, 0.6)],
        "training, each step": [],
        "all of train": [(3, 0.5)],
        "all of test": [(2, 0.75), (3, 0.7)],
    }


def test_accuracies_are_percent() -> None:
    axis = Figure().add_subplot()
    draw_accuracies(axis, LINES)
    found = drawn(axis)
    assert found["train"] == [(3, pytest.approx(75))]
    assert found["test"] == [(2, pytest.approx(25)), (3, pytest.approx(50))]


@pytest.mark.parametrize(
    ("label", "predicted", "text", "colour"), [(3, 3, "3", "tab:green"), (3, 5, "5, not 3", "tab:red")]
)
def test_the_prediction_is_named_and_in_red_the_right_class(label: int, predicted: int, text: str, colour: str) -> None:
    axis = Figure().add_subplot()
    name_example(axis, label, predicted)
    assert (axis.title.get_text(), axis.title.get_color()) == (text, colour)


def test_examples_fill_rows_below_the_curves(tmp_path: Path) -> None:
    places: list[Any] = []
    picture = ResultFigure(4, row_inches=1.0, curves=1.0, show=lambda axis, _: places.append(axis.get_subplotspec()))
    lines = [{"step": 1, "loss": 0.5}, {"step": 1, "evaluation": "test", "loss": 0.5, "accuracy": 0.5}]
    picture.draw(tmp_path / "x.png", [ClassifiedExample(np.zeros(1), 1, 2)] * 5, lines, "a title")
    found = [(place.rowspan.start, place.colspan.start) for place in places]
    assert found == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
