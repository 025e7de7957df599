"""The score of a classifier by hand, and what a network has to beat. (The report: with the commands that print it.)"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.commands import train_classify, train_pointcloud, train_sequence
from distconv.jobs.training.classifier import Classifier, majority_vote, score


def test_a_majority_vote_answers_what_is_most_frequent_in_training() -> None:
    # 2 in training, where 0 is most frequent among what is held out.
    assert majority_vote(np.array([2, 0, 2, 1]), np.array([0, 0, 0, 2, 1])) == 0.2


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
    with pytest.raises(DataError, match=r"x\.h5: the loss of samples 4 to 7 of 'train' is "):
        score("x.h5", "train", [batch])


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (train_classify, list(range(16))),
        (train_pointcloud, list(range(8))),
        (train_sequence, [0, 14, 28, 42, 56, 70, 84, 99]),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_picture_shows_some_samples_or_all_if_there_are_few(command: Any, shown: list[int]) -> None:
    assert list(command.JOB.shown_samples(100)) == shown
    assert set(command.JOB.shown_samples(3)) == {0, 1, 2}


def test_logits_are_checked_before_each_loss_and_in_each_prediction() -> None:
    checked: list[torch.Tensor] = []
    trainer: Any = SimpleNamespace(check_logits=checked.append, evaluation_model=lambda inputs: inputs + 1)
    logits, labels = torch.zeros(2, 3), torch.tensor([0, 2])
    assert Classifier.loss(trainer, logits, labels).item() == pytest.approx(math.log(3))
    assert Classifier._logits(trainer, logits).tolist() == [[1.0] * 3] * 2
    assert [each.tolist() for each in checked] == [logits.tolist(), (logits + 1).tolist()]
