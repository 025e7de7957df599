"""The score of a classifier, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.training.score import score


def test_every_sample_counts_once_in_batches_of_any_size() -> None:
    # Probabilities of the labels: 1/2, 3/4, 1/4.
    first = (0, 1), torch.tensor([0, 0]), torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    second = (2,), torch.tensor([1]), torch.tensor([[math.log(3), 0.0]])
    found = score("x", "test", [first, second])
    assert (found.samples, found.correct) == (3, 2)
    assert found.loss == pytest.approx(-(math.log(1 / 2) + math.log(3 / 4) + math.log(1 / 4)) / 3)
    assert found.accuracy == pytest.approx(2 / 3)


def test_a_batch_whose_loss_is_infinite_is_named() -> None:
    batch = (4, 7), torch.tensor([0, 1]), torch.tensor([[0.0, math.inf], [0.0, 0.0]])
    with pytest.raises(DataError, match=r"x\.h5: the loss on samples 4 to 7 of 'train' is "):
        score("x.h5", "train", [batch])
