"""Figure at the end of a classifier's training: curves of loss and accuracy, and images with predicted classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.jobs.training.picture import ResultFigure


def _show(axis: Any, image: NDArray[Any]) -> None:
    """Draw an image (C, H, W)."""
    image = np.moveaxis(image.astype(np.float64), 0, -1)
    low, high = image.min(), image.max()
    image = (image - low) / (high - low if high > low else 1.0)
    # Three channels are shown as red, green and blue; otherwise only the first channel is shown.
    axis.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray")
    axis.set_xticks([])
    axis.set_yticks([])


RESULT_FIGURE = ResultFigure(columns=8, row_inches=1.6, curves=2.5, show=_show)
