"""The picture at the end of a training: curves of loss and accuracy, sequences with label and prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import Layout, draw_training, name_example

LAYOUT = Layout(columns=4, row_inches=1.8, curves=2.0)
BITS_IN_A_ROW = 25


@dataclass(frozen=True, eq=False)
class Example:
    """The values of a sequence (T, C), its class, and the class predicted."""

    values: NDArray[np.float32]
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
    values = example.values
    if values.shape[1] == 1:
        whole = max(1, len(values) // BITS_IN_A_ROW) * BITS_IN_A_ROW
        bits = np.resize(values[:, 0], whole) if len(values) < whole else values[:whole, 0]
        axis.imshow(bits.reshape(-1, BITS_IN_A_ROW), cmap="gray_r", vmin=0, vmax=1, aspect="auto")
        axis.set(xticks=[], yticks=[])
    else:
        axis.imshow(values.T, aspect="auto", origin="lower", cmap="magma")
        axis.set(xlabel="frame", ylabel="coefficient")
    name_example(axis, example.label, example.predicted)
