"""What is written above an example, and where examples stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from distconv.jobs.training.picture import Layout, draw_training, name_example


@pytest.mark.parametrize(
    ("label", "predicted", "text", "colour"), [(3, 3, "3", "tab:green"), (3, 5, "5, not 3", "tab:red")]
)
def test_the_prediction_is_named_and_in_red_the_right_class(label: int, predicted: int, text: str, colour: str) -> None:
    axis = Figure().add_subplot()
    name_example(axis, label, predicted)
    assert (axis.title.get_text(), axis.title.get_color()) == (text, colour)


def test_examples_fill_rows_below_the_curves(tmp_path: Path) -> None:
    places: list[Any] = []
    draw = [lambda axis: places.append(axis.get_subplotspec())] * 5
    lines = [{"step": 1, "loss": 0.5}, {"step": 1, "evaluation": "test", "loss": 0.5, "accuracy": 0.5}]
    draw_training(tmp_path / "x.png", lines, "a title", Layout(columns=4, row_inches=1.0, curves=1.0), draw)
    found = [(place.rowspan.start, place.colspan.start) for place in places]
    assert found == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
