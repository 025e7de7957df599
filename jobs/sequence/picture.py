"""Figure at the end of a training: curves of loss and accuracy, sequences with label and prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import ResultFigure

BITS_IN_A_ROW = 25


def _show(axis: Any, values: NDArray[Any]) -> None:
    """Draw a sequence (T, C): bits in rows, or coefficients over time."""
    if values.shape[1] == 1:
        whole = max(1, len(values) // BITS_IN_A_ROW) * BITS_IN_A_ROW
        bits = np.resize(values[:, 0], whole) if len(values) < whole else values[:whole, 0]
        axis.imshow(bits.reshape(-1, BITS_IN_A_ROW), cmap="gray_r", vmin=0, vmax=1, aspect="auto")
        axis.set(xticks=[], yticks=[])
    else:
        axis.imshow(values.T, aspect="auto", origin="lower", cmap="magma")
        axis.set(xlabel="frame", ylabel="coefficient")


RESULT_FIGURE = ResultFigure(columns=4, row_inches=1.8, curves=2.0, show=_show)
