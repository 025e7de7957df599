"""The embedded images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distconv.jobs.images import digits
from tests.jobs.approved import assert_approved, weighted


def test_they_are_the_same_each_time_and_every_class_is_there() -> None:
    train, test = digits.render_digits("train"), digits.render_digits("test")
    shown = [
        f"{name}: {weighted(each.labels)}, {weighted(each.pixels[:9])}"
        for name, each in (("train", train), ("test", test))
    ]
    assert_approved("digits", "\n".join(shown))
    again = digits.render_digits("test")
    assert np.array_equal(test.pixels, again.pixels) and np.array_equal(test.labels, again.labels)
    for images, count in ((train, 6000), (test, 1000)):
        assert images.pixels.shape == (count, 1, 28, 28) and images.pixels.dtype == np.uint8
        assert set(images.labels) == set(range(10))
    assert not np.array_equal(train.pixels[:1000], test.pixels)


class Middle:
    """Draws the middle of every range, and no noise."""

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def normal(self, mean: float, spread: float, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape)


SEGMENTS = "abcdef bc abdeg abcdg bcfg acdfg acdefg abc abcdefg abcdfg".split()
"""Segments of the digits from 0 on, lettered clockwise from the top, g in the middle."""


@pytest.mark.parametrize("label", range(10))
def test_a_digit_lights_the_segments_of_the_usual_display(label: int) -> None:
    image = digits._digit(label, Middle())  # type: ignore[arg-type]  # nine pixels wide, from row 4.5, column 9
    middles = {"a": (4, 13), "b": (9, 18), "c": (18, 18), "d": (22, 13), "e": (18, 9), "f": (9, 9), "g": (13, 13)}
    assert {name for name, at in middles.items() if image[at] > 200} == set(SEGMENTS[label])
    assert all(image[at] in (0, 255) for at in middles.values())
