"""The picture at the end of a classifier's training: curves of loss and accuracy, and images with predicted classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import Layout, draw_training, name_example

LAYOUT = Layout(columns=8, row_inches=1.6, curves=2.5)


@dataclass(frozen=True, eq=False)
class Example:
    """One image (C, H, W), its class, and the class predicted."""

    image: NDArray[Any]
    label: int
    predicted: int


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
    image = np.moveaxis(example.image.astype(np.float64), 0, -1)
    low, high = image.min(), image.max()
    image = (image - low) / (high - low if high > low else 1.0)
    # Red, green and blue if there are three channels, else the first alone.
    axis.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray")
    name_example(axis, example.label, example.predicted)
    axis.set_xticks([])
    axis.set_yticks([])
