"""Embedded images of digits, for a first run without a data set: seven segments, shifted, scaled and noisy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .formats import Images

NAME = "digits"
"""Value of ``--data`` that selects these images."""

SIZE = 28
"""Number of rows and of columns, as in MNIST."""

COUNT = {"train": 6000, "test": 1000}
"""Number of images of each group."""

# Lit segments of each digit: top, upper left, upper right, middle, lower left, lower right, bottom.
_LIT = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")

# Each segment's ends (row, column), in units of the digit's width, which is half its height.
_SEGMENTS = (
    ((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 1)), ((1, 0), (1, 1)), ((1, 0), (2, 0)), ((1, 1), (2, 1)),
    ((2, 0), (2, 1)),
)  # fmt: skip


def render_digits(group: str) -> Images:
    """Return the images of ``train`` or ``test``. They are the same on every rank and in every run."""
    random = np.random.default_rng((28, list(COUNT).index(group)))
    labels = random.integers(0, 10, COUNT[group])
    pixels = np.stack([_digit(label, random) for label in labels])[:, None]
    return Images(pixels, labels.astype(np.int64))


def _digit(label: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return one image (H, W)."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    width, thickness = random.uniform(8, 10), random.uniform(0.8, 2.0)
    top, left = random.uniform(2, SIZE - 3 - 2 * width), random.uniform(2, SIZE - 3 - width)
    slant = random.uniform(-0.3, 0.3)
    light = random.normal(0, 0.1, (SIZE, SIZE))
    down = (rows - top) / width
    right = (columns - left) / width + slant * (down - 1)
    for lit, (begin, end) in zip(_LIT[label], _SEGMENTS, strict=True):
        if lit == "1":
            across = np.maximum(np.maximum(begin[0] - down, down - end[0]), 0)
            along = np.maximum(np.maximum(begin[1] - right, right - end[1]), 0)
            light += np.clip(1 + thickness - width * np.hypot(across, along), 0, 1)
    return (255 * np.clip(light, 0, 1)).astype(np.uint8)
