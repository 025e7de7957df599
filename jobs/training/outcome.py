"""What the training of a classifier came to: scores, what it had to beat, and the report of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .report import Metrics, conclude, picture, times
from .score import Score
from .training import Training

Draw = Callable[[Path, list[dict[str, Any]], str], None]
"""Draws the lines of metrics.jsonl and examples to a file, with a title."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Scores of all groups of samples, accuracies that others have on the held-out ones, and times."""

    scores: Mapping[str, Score]
    training_s: float
    total_s: float
    baselines: Mapping[str, float] = field(default_factory=dict)


def majority_vote(train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Accuracy on labels ``test`` of always answering the class that is most frequent in ``train``."""
    return float((test == np.bincount(train).argmax()).mean())


def write_score(trainer: Training, metrics: Metrics, group: str, score: Score) -> None:
    """A line of metrics.jsonl: how the network does on a group at this step."""
    metrics.write(step=trainer.step_count, evaluation=group, accuracy=score.accuracy, **asdict(score))


def report(
    trainer: Training, metrics: Metrics, outcome: Outcome, more: Mapping[str, Any], *, no_test: str, draw: Draw
) -> None:
    """Print, write summary.json with ``more`` in it, and draw result.png, all on rank 0. Collective.

    ``no_test`` is printed where nothing was held out.
    """
    scores = outcome.scores
    results: dict[str, Any] = {f"{group}_accuracy": score.accuracy for group, score in scores.items()}
    results |= {f"{group}_loss": score.loss for group, score in scores.items()} | dict(more)
    results |= {"training_s": outcome.training_s, "total_s": outcome.total_s}

    def show() -> None:
        for group, score in scores.items():
            print(f"{group} accuracy: {score}")
        for name, accuracy in outcome.baselines.items():
            print(f"test accuracy of a {name}: {100 * accuracy:.2f} %")
        if "test" not in scores:
            print(no_test)
        print(times(outcome.training_s, outcome.total_s))
        path = metrics.folder / "result.png"
        title = f"{trainer.settings.model} after {trainer.step_count} steps on {trainer.where}, " + ", ".join(
            f"{group} accuracy {100 * score.accuracy:.2f} %" for group, score in scores.items()
        )
        print(picture(path, lambda: draw(path, list(metrics.lines()), title)))

    conclude(trainer, metrics, results, show)
