"""The picture at the end of a training: curves of loss and accuracy, clouds with label and prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import Layout, draw_training, name_example

LAYOUT = Layout(columns=4, row_inches=3.0, curves=1.3, projection="3d")


@dataclass(frozen=True, eq=False)
class Example:
    """The points of a cloud (P, 3), its class, and the class predicted."""

    points: NDArray[np.float32]
    label: str
    predicted: str


def draw(
    path: str | os.PathLike[str], examples: Sequence[Example], lines: Sequence[dict[str, Any]], title: str
) -> None:
    """Write the picture; ``lines`` are those of metrics.jsonl.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    draw_training(path, lines, title, LAYOUT, [partial(_draw_example, example) for example in examples])


def _draw_example(example: Example, axis: Any) -> None:
    x, y, z = example.points.T
    axis.scatter(x, y, z, c=z, s=1.0, linewidths=0)
    name_example(axis, example.label, example.predicted)
    axis.set_aspect("equal")
    axis.set_axis_off()
