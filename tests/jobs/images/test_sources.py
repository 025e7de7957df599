"""Where images come from: any box of a moved image is that of the image moved as a whole."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from distconv.distribution import Interval
from distconv.jobs.images.sources import Arrays, ShiftedImages

IMAGES = np.arange(1, 1 + 3 * 2 * 5 * 4, dtype=np.uint8).reshape(3, 2, 5, 4)
SOURCE = Arrays(Path("x"), MPI.COMM_SELF, image=IMAGES)


def moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """The image moved by hand; zeros come in."""
    result = np.zeros_like(image)
    height, width = image.shape[1:]
    for row, column in product(range(height), range(width)):
        if 0 <= row - down < height and 0 <= column - right < width:
            result[:, row, column] = image[:, row - down, column - right]
    return result


@pytest.mark.parametrize("shift", [0, 1, 3, 6])
def test_a_box_of_a_moved_image_is_cut_out_of_the_whole_moved_image(shift: int) -> None:
    part = ShiftedImages(SOURCE, 3, shift=shift, seed=1)
    for sample in range(3):
        whole = moved(IMAGES[sample], *part.moves(sample)) if shift else IMAGES[sample]
        for (top, bottom), (left, right) in product(combinations(range(6), 2), combinations(range(5), 2)):
            box = (Interval(sample, sample + 1), Interval(0, 2), Interval(top, bottom), Interval(left, right))
            assert np.array_equal(part.read("image", box)[0], whole[:, top:bottom, left:right])


def test_large_chunks_of_the_source_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[tuple[object, ...]] = []
    monkeypatch.setattr(Arrays, "warn_of_large_chunks", lambda *given: warned.append(given))
    ShiftedImages(SOURCE, 3, shift=1, seed=1).warn_of_large_chunks("image", (1, 2, 3, 4))
    assert warned == [(SOURCE, "image", (1, 2, 3, 4))]


def test_moves_follow_from_seed_epoch_and_sample_and_reach_every_way() -> None:
    part, again, other = (ShiftedImages(SOURCE, 3, shift=2, seed=seed) for seed in (1, 1, 2))
    moves = [part.moves(sample) for sample in range(200)]
    assert moves == [again.moves(sample) for sample in range(200)]
    assert moves != [other.moves(sample) for sample in range(200)]
    assert set(moves) == set(product(range(-2, 3), repeat=2))
    part.epoch = 1
    assert moves != [part.moves(sample) for sample in range(200)]


def test_a_part_has_fewer_samples_and_is_otherwise_its_source() -> None:
    part = ShiftedImages(SOURCE, 2)
    assert part.shape("image") == (2, 2, 5, 4)
    assert part.chunks("image") == SOURCE.chunks("image") == (1, 2, 5, 4)
