"""Curves of a classifier's training on axes of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def draw_losses(axis: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Losses of the steps and of the evaluations among the ``lines`` of metrics.jsonl."""
    steps = [line for line in lines if "evaluation" not in line]
    axis.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="0.7", linewidth=0.8)
    axis.plot([], [], color="0.7", label="training, each step")
    for group in ("train", "test"):
        found = [line for line in lines if line.get("evaluation") == group]
        axis.plot([line["step"] for line in found], [line["loss"] for line in found], "o-", label=f"all of {group}")
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    axis.legend(fontsize=8)


def draw_accuracies(axis: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Accuracies of the evaluations among them."""
    for group in ("train", "test"):
        found = [line for line in lines if line.get("evaluation") == group]
        percent = [100 * line["accuracy"] for line in found]
        axis.plot([line["step"] for line in found], percent, "o-", label=group)
    axis.set(xlabel="step", ylabel="accuracy (%)")
    axis.legend(fontsize=8)
