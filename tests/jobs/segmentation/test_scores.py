"""Scores from counts: by hand, each place once, ignored ones not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from distconv.jobs.segmentation.scores import Confusion, SegmentationScores, is_counting_rank


@pytest.mark.parametrize(
    ("coords", "counts"),
    [({"n": 1, "h": 2}, True), ({"n": 1, "h": 2, "c": 0, "r": 0}, True), ({"n": 0, "h": 0, "c": 1, "r": 0}, False),
     ({"n": 0, "h": 0, "c": 0, "r": 1}, False)],
)  # fmt: skip
def test_of_ranks_with_the_same_block_the_first_counts(coords: dict[str, int], counts: bool) -> None:
    dist: Any = SimpleNamespace(grid=SimpleNamespace(coords=coords), split_axes=("n", "h"))
    assert is_counting_rank(dist) == counts


def test_scores_are_those_counted_by_hand() -> None:
    predicted = np.array([[0, 0, 1, 2], [1, 1, 0, 0]])
    label = np.array([[0, 1, 1, 0], [1, 9, 4, 0]])  # 9 is ignored, 4 is no class
    confusion = Confusion(3, ignore=9)
    for one, other in zip(predicted, label, strict=True):
        confusion.add(one, other)
    scores = confusion.sum_over(MPI.COMM_SELF)
    assert (scores.count, scores.correct, scores.accuracy) == (7, 4, 4 / 7)
    # Class 0: both 2, called 4, there 3. Class 1: both 2, called 2, there 3. Class 2: called once, nowhere.
    assert scores.dice == pytest.approx((4 / 7, 4 / 5, 0))
    assert scores.iou == pytest.approx((2 / 5, 2 / 3, 0))
    assert scores.results["mean_iou"] == pytest.approx((2 / 5 + 2 / 3) / 3)


def test_of_one_class_scores_are_those_of_the_places_with_1() -> None:
    confusion = Confusion(1)
    confusion.add(np.array([1, 1, 0, 0]), np.array([1.0, 0.0, 1.0, 0.0]))
    assert (confusion.scores.dice, confusion.scores.iou) == ((0.5,), (pytest.approx(1 / 3),))


def test_nothing_is_said_of_a_class_that_is_nowhere() -> None:
    scores = SegmentationScores(4, 3, (0.5, float("nan")), (0.25, float("nan")))
    assert scores.results == {
        "accuracy": 0.75,
        "mean_dice": 0.5,
        "mean_iou": 0.25,
        "dice": [0.5, None],
        "iou": [0.25, None],
    }
    assert str(scores) == "accuracy 75.00 % (3 of 4), Dice (F1): 0.5000, -; IoU: 0.2500, -"
    assert SegmentationScores(0, 0, (float("nan"),), (float("nan"),)).results["accuracy"] is None


def test_labels_that_are_no_whole_numbers_are_wrong() -> None:
    confusion = Confusion(3)
    confusion.add(np.array([0, 1, 2, 0, 1]), np.array([0.5, 1.0, np.nan, np.inf, 1.5]))
    assert (confusion.scores.count, confusion.scores.correct) == (5, 1)
