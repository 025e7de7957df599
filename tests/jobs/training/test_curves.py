"""Curves show the lines of metrics.jsonl: which of them, and in which unit."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from distconv.jobs.training.curves import draw_accuracies, draw_losses

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
