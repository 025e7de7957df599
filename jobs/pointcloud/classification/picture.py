"""Figure at the end of a training: curves of loss and accuracy, clouds with label and prediction."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from distconv.jobs.training.picture import ResultFigure


def _show(axis: Any, points: NDArray[Any]) -> None:
    """Draw the points of a cloud (P, 3)."""
    x, y, z = points.T
    axis.scatter(x, y, z, c=z, s=1.0, linewidths=0)
    axis.set_aspect("equal")
    axis.set_axis_off()


RESULT_FIGURE = ResultFigure(columns=4, row_inches=3.0, curves=1.3, show=_show, projection="3d")
