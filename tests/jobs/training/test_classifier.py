"""The score of a classifier by hand, and what a network has to beat. (The report: with the commands that print it.)"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.training.classifier import Classifier, ClassifierJob, Score, majority_vote, score
from distconv.jobs.training.settings import TrainingSettings


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


def test_logits_are_checked_before_each_loss_and_in_each_prediction() -> None:
    checked: list[torch.Tensor] = []
    trainer: Any = SimpleNamespace(check_logits=checked.append, evaluation_model=lambda inputs: inputs + 1)
    logits, labels = torch.zeros(2, 3), torch.tensor([0, 2])
    assert Classifier.loss(trainer, logits, labels).item() == pytest.approx(math.log(3))
    assert Classifier._logits(trainer, logits).tolist() == [[1.0] * 3] * 2
    assert [each.tolist() for each in checked] == [logits.tolist(), (logits + 1).tolist()]


class Judged:
    """A trained classifier of three samples of each group: the second of two is always taken for class 1."""

    step_count, epoch = 7, 2

    def __init__(self) -> None:
        groups = {
            "train": SimpleNamespace(labels=np.array([0, 1, 1])),
            "test": SimpleNamespace(labels=np.array([1, 0])),
        }
        self.samples = SimpleNamespace(groups=groups, class_names=("zero", "one"))

    def evaluate(self, group: str) -> Score:
        return Score(3, 2, 0.25) if group == "train" else Score(2, 1, 0.5)

    def predictions(self, group: str) -> Any:
        for samples in ((0, 1), (2,)) if group == "train" else ((0, 1),):
            yield SimpleNamespace(samples=samples), torch.tensor([[0.0, 1.0]] * len(samples))
        raise AssertionError("all examples were found before")


def test_a_job_evaluates_reports_and_shows_examples_of_the_last_group(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[Any] = []
    drawn: list[Any] = []
    metrics: Any = SimpleNamespace(write=lambda **line: written.append(line), lines=lambda: iter(("a", "b")))
    picture: Any = SimpleNamespace(draw=lambda *given: drawn.append(given))
    job = ClassifierJob(
        settings=TrainingSettings, samples=lambda options, comm: None, trainer=lambda: None, extents=str,  # type: ignore[arg-type, return-value]
        picture=picture, shown_samples=lambda count: range(1, count), example_values=lambda _, group, n: np.array([n]),
        no_test_message="nothing was held out", further_results=lambda options, samples: {"more": options.more},
        baselines=lambda trainer: {"majority vote": 0.125},
    )  # fmt: skip
    trainer: Any = Judged()
    options: Any = SimpleNamespace(more=5, evaluate_every=3)
    for epoch in (2, 3):
        trainer.epoch = epoch
        job.after_epoch(options, trainer, metrics)
    job.after_epoch(SimpleNamespace(), trainer, metrics)  # type: ignore[arg-type]
    test = {"step": 7, "evaluation": "test", "accuracy": 0.5, "samples": 2, "correct": 1, "loss": 0.5}
    assert written == [test, test]
    outcome = job.evaluate(options, trainer, metrics)
    train = {"step": 7, "evaluation": "train", "accuracy": 2 / 3, "samples": 3, "correct": 2, "loss": 0.25}
    assert written[2:] == [train, test]
    scores = {"train_accuracy": 2 / 3, "test_accuracy": 0.5, "train_loss": 0.25, "test_loss": 0.5}
    assert outcome.results == {**scores, "more": 5, "baselines": {"majority vote": 0.125}}
    assert outcome.title == "train accuracy 66.67 %, test accuracy 50.00 %"
    (example,) = job.examples(trainer, outcome)
    assert (example.values.tolist(), example.label, example.predicted) == ([1], "zero", "one")
    outcome.show(trainer, metrics)
    outcome.draw(Path("x.png"), [example], "a title", metrics)
    assert drawn == [(Path("x.png"), [example], ["a", "b"], "a title")]
    del trainer.samples.groups["test"]
    alone = job.evaluate(options, trainer, metrics)
    job.after_epoch(SimpleNamespace(), trainer, metrics)  # type: ignore[arg-type]
    assert len(written) == 5 and alone.results["baselines"] == {}
    assert [each.label for each in job.examples(trainer, alone)] == ["one", "one"]
    alone.show(trainer, metrics)
    assert "baselines" not in replace(job, baselines=None).evaluate(options, trainer, metrics).results
    assert capsys.readouterr().out.splitlines() == [
        "train accuracy: 66.67 % (2 of 3), loss 0.2500", "test accuracy: 50.00 % (1 of 2), loss 0.5000",
        "test accuracy of a majority vote: 12.50 %", "train accuracy: 66.67 % (2 of 3), loss 0.2500",
        "nothing was held out",
    ]  # fmt: skip
