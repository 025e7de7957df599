"""Classifiers in training, however the ranks share the work: loss, scores, what they had to beat, and the report."""

from __future__ import annotations

import argparse
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.data.loader import Batch, EpochLoader
from distconv.errors import DataError
from distconv.jobs import progress
from distconv.placement import gather

from .job import Job, JobOutcome
from .picture import ClassifiedExample, Picture
from .report import Metrics
from .training import Training


@dataclass(frozen=True)
class Score:
    """How a classifier did on a group of samples, each of which counts once."""

    samples: int
    correct: int
    loss: float
    """Mean cross entropy."""

    @property
    def accuracy(self) -> float:
        """Share of the samples that were classified correctly."""
        return self.correct / self.samples

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} % ({self.correct} of {self.samples}), loss {self.loss:.4f}"


def score(path: object, group: str, batches: Iterable[tuple[Sequence[int], torch.Tensor, torch.Tensor]]) -> Score:
    """The score of all batches of a group: indices of the samples, labels (N), logits (N, classes) of each.

    Raises
    ------
    DataError
        If the loss on a batch is not finite.
    """
    count, correct, total = 0, 0, 0.0
    for samples, labels, logits in batches:
        loss = float(F.cross_entropy(logits.double(), labels, reduction="sum"))
        if not math.isfinite(loss):
            raise DataError(
                f"{path}: the loss on samples {samples[0]} to {samples[-1]} of {group!r} is {loss}; look for NaN in "
                "them"
            )
        count += len(labels)
        total += loss
        correct += int((logits.argmax(1) == labels).sum())
    return Score(count, correct, total / count)


class LabelledGroups(Protocol):
    """Samples of ``train`` and, where some are held out, ``test``."""

    comm: MPI.Intracomm

    @property
    def groups(self) -> Mapping[str, Any]:
        """Each has the ``labels`` (N) of its samples."""

    def place(self, group: str) -> object:
        """Where a group comes from, as an error names it."""


class Classifier(Training):
    """A classifier in training on labelled samples."""

    samples: LabelledGroups

    @abstractmethod
    def batches_of(self, group: str) -> EpochLoader:
        """Batches of ``train`` or ``test`` in order, as they are evaluated."""

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raise DistconvError if the model gives none for these classes."""

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of logits (N, classes)."""
        self.check_logits(outputs)
        return F.cross_entropy(outputs, labels)

    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""
        return self.outputs(self.batches_of(group).epoch(0), self._logits)

    def _logits(self, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.evaluated(inputs)
        self.check_logits(logits)
        return gather(logits).cpu()

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the samples of ``train`` or ``test``, as they are. Collective.

        Raises
        ------
        DataError
            On all ranks, if the loss on a batch is not finite.
        """
        labels = self.samples.groups[group].labels
        with progress.bar(rank=self.comm.rank, total=len(labels), unit="sample", desc=f"evaluating {group}") as bar:

            def predicted() -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
                for batch, logits in self.predictions(group):
                    yield batch.samples, torch.as_tensor(labels[list(batch.samples)]), logits
                    bar.update(len(batch.samples))

            return score(self.samples.place(group), group, predicted())


def majority_vote(train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Accuracy on labels ``test`` of always answering the class that is most frequent in ``train``."""
    return float((test == np.bincount(train).argmax()).mean())


@dataclass(frozen=True, kw_only=True)
class ClassifierScores(JobOutcome):
    """Scores of all groups of samples, and accuracies that others have on the held-out ones."""

    scores: Mapping[str, Score]
    baselines: Mapping[str, float]
    more: Mapping[str, Any]
    """Further results of the job."""
    no_test: str
    """What is printed where nothing was held out."""
    picture: Picture

    @property
    def results(self) -> dict[str, Any]:
        """Accuracies and losses, and those of the job."""
        results: dict[str, Any] = {f"{group}_accuracy": score.accuracy for group, score in self.scores.items()}
        return results | {f"{group}_loss": score.loss for group, score in self.scores.items()} | dict(self.more)

    @property
    def title(self) -> str:
        """The accuracies."""
        return ", ".join(f"{group} accuracy {100 * score.accuracy:.2f} %" for group, score in self.scores.items())

    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print a line for each score."""
        for group, outcome in self.scores.items():
            print(f"{group} accuracy: {outcome}")
        for name, accuracy in self.baselines.items():
            print(f"test accuracy of a {name}: {100 * accuracy:.2f} %")
        if "test" not in self.scores:
            print(self.no_test)

    def draw(self, path: Path, examples: Sequence[ClassifiedExample], title: str, metrics: Metrics) -> None:
        """Curves of the training, and the examples."""
        self.picture.draw(path, examples, list(metrics.lines()), title)


@dataclass(frozen=True, kw_only=True)
class ClassifierJob(Job):
    """The training of a classifier, which is evaluated behind each epoch, or each so many (``--evaluate-every``)."""

    picture: Picture
    shown: Callable[[int], Sequence[int]]
    """Which of so many samples are examples for the picture."""
    value: Callable[[Any, str, int], NDArray[Any]]
    """What is drawn of a sample of a group. Collective."""
    name: Callable[[Any, int], object] = lambda samples, label: samples.class_names[label]
    """Of a class."""
    no_test: str
    more: Callable[[argparse.Namespace, Any], dict[str, Any]]
    """Results besides the scores."""
    baselines: Callable[[Any], dict[str, float]] | None = None
    """What the trained network has to beat on held-out samples. Collective."""

    def after_epoch(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> None:
        """Evaluate on what is held out."""
        if "test" in trainer.samples.groups and trainer.epoch % getattr(options, "evaluate_every", 1) == 0:
            _evaluated(trainer, metrics, "test")

    def judge(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> ClassifierScores:
        """The scores of all groups, and of the baselines. Collective."""
        samples = trainer.samples
        scores = {group: _evaluated(trainer, metrics, group) for group in samples.groups}
        more = self.more(options, samples)
        baselines: dict[str, float] = {}
        if self.baselines is not None:
            baselines = self.baselines(trainer) if "test" in samples.groups else {}
            more |= {"baselines": baselines}
        return ClassifierScores(
            scores=scores, baselines=baselines, more=more, no_test=self.no_test, picture=self.picture
        )

    def examples(self, trainer: Any, outcome: Any) -> list[ClassifiedExample]:
        """Some samples, held-out ones if there are any, with the classes the network gives them. Collective."""
        samples, group = trainer.samples, list(outcome.scores)[-1]
        labels, examples = samples.groups[group].labels, []
        wanted = set(self.shown(len(labels)))
        for batch, logits in trainer.predictions(group):
            for sample, guess in zip(batch.samples, logits.argmax(1).tolist(), strict=False):
                if sample in wanted:
                    names = (self.name(samples, int(label)) for label in (labels[sample], guess))
                    examples.append(ClassifiedExample(self.value(samples, group, sample), *names))
            if len(examples) == len(wanted):
                break
        return examples


def _evaluated(trainer: Classifier, metrics: Metrics, group: str) -> Score:
    """The score of a group, with a line of metrics.jsonl that says how the network does at this step."""
    outcome = trainer.evaluate(group)
    metrics.write(step=trainer.step_count, evaluation=group, accuracy=outcome.accuracy, **asdict(outcome))
    return outcome
