"""Classifiers in training: loss, scores, baselines and the report.

The jobs for images, point clouds and sequences derive from it. It is independent of how ranks divide the work: a grid,
a plan or a pipeline.
"""

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
from .picture import ClassifiedExample, ResultFigure
from .report import Metrics
from .training import Training


@dataclass(frozen=True)
class Score:
    """Result of a classifier on a group of samples, each counted once."""

    samples: int
    correct: int
    loss: float
    """Mean cross entropy."""

    @property
    def accuracy(self) -> float:
        """Fraction of the samples that were classified correctly."""
        return self.correct / self.samples

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.2f} % ({self.correct} of {self.samples}), loss {self.loss:.4f}"


def score(path: object, group: str, batches: Iterable[tuple[Sequence[int], torch.Tensor, torch.Tensor]]) -> Score:
    """Return the score of a group of samples.

    Parameters
    ----------
    path : object
        File or folder of the samples, as an error names it.
    group : str
        Name of the group, as an error names it.
    batches : iterable of (sequence of int, torch.Tensor, torch.Tensor)
        Sample indices, labels (N) and logits (N, classes) of each batch.

    Returns
    -------
    Score
        Counts, and the cross entropy averaged over all samples (computed in float64).

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
                f"{path}: the loss of samples {samples[0]} to {samples[-1]} of {group!r} is {loss}. Check them for NaN."
            )
        count += len(labels)
        total += loss
        correct += int((logits.argmax(1) == labels).sum())
    return Score(count, correct, total / count)


class LabelledGroups(Protocol):
    """Samples of the group ``train`` and, if some are held out, ``test``."""

    comm: MPI.Intracomm

    @property
    def groups(self) -> Mapping[str, Any]:
        """Groups by name; each has the ``labels`` (N) of its samples."""

    def source_path(self, group: str) -> object:
        """Return the file or folder of a group, as an error names it."""


class Classifier(Training):
    """A classifier in training on labelled samples."""

    samples: LabelledGroups

    @abstractmethod
    def batches_of(self, group: str) -> EpochLoader:
        """Return a loader of ``train`` or ``test`` for evaluation, in the order of the samples."""

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raise DistconvError if the output has too few logits. By default nothing is checked."""

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of ``outputs`` (N, classes) for ``labels`` (N).

        Parameters
        ----------
        outputs : torch.Tensor
        labels : torch.Tensor

        Returns
        -------
        torch.Tensor
        """
        self.check_logits(outputs)
        return F.cross_entropy(outputs, labels)

    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield the batches of ``train`` or ``test`` in order, with their full logits (N, classes). Collective.

        Every rank receives all logits of a batch, on the CPU.
        """
        return self.outputs(self.batches_of(group).epoch(0), self._logits)

    def _logits(self, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.evaluation_model(inputs)
        self.check_logits(logits)
        return gather(logits).cpu()

    def evaluate(self, group: str) -> Score:
        """Return loss and accuracy on ``train`` or ``test``, without augmentation. Collective: call on every rank.

        Parameters
        ----------
        group : str
            ``train`` or ``test``.

        Returns
        -------
        Score
            The same on all ranks.

        Raises
        ------
        DataError
            On all ranks, if the loss on a batch is not finite.
        """
        labels = self.samples.groups[group].labels
        with progress.progress_bar(
            rank=self.comm.rank, total=len(labels), unit="sample", desc=f"evaluating {group}"
        ) as bar:

            def predicted() -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
                for batch, logits in self.predictions(group):
                    yield batch.samples, torch.as_tensor(labels[list(batch.samples)]), logits
                    bar.update(len(batch.samples))

            return score(self.samples.source_path(group), group, predicted())


def majority_vote(train: NDArray[np.int64], test: NDArray[np.int64]) -> float:
    """Return the accuracy on ``test`` of always predicting the most frequent class of ``train``.

    Parameters
    ----------
    train, test : numpy.ndarray of int64
        Labels (N).

    Returns
    -------
    float
        Fraction of ``test``.
    """
    return float((test == np.bincount(train).argmax()).mean())


@dataclass(frozen=True, kw_only=True)
class ClassifierScores(JobOutcome):
    """Scores of all groups of samples, and accuracies of the baselines on the held-out samples."""

    scores: Mapping[str, Score]
    baselines: Mapping[str, float]
    further_results: Mapping[str, Any]
    """Further results of the job."""
    no_test_message: str
    """Line printed if there are no held-out samples."""
    picture: ResultFigure

    @property
    def results(self) -> dict[str, Any]:
        """Accuracies and losses of all groups, and the further results of the job."""
        results: dict[str, Any] = {f"{group}_accuracy": score.accuracy for group, score in self.scores.items()}
        return (
            results | {f"{group}_loss": score.loss for group, score in self.scores.items()} | dict(self.further_results)
        )

    @property
    def title(self) -> str:
        """Accuracies of all groups."""
        return ", ".join(f"{group} accuracy {100 * score.accuracy:.2f} %" for group, score in self.scores.items())

    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print a line for each group and each baseline.

        Parameters
        ----------
        trainer, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.show`.
        """
        for group, outcome in self.scores.items():
            print(f"{group} accuracy: {outcome}")
        for name, accuracy in self.baselines.items():
            print(f"test accuracy of a {name}: {100 * accuracy:.2f} %")
        if "test" not in self.scores:
            print(self.no_test_message)

    def draw(self, path: Path, examples: Sequence[ClassifiedExample], title: str, metrics: Metrics) -> None:
        """Draw the curves of the training and the examples.

        Parameters
        ----------
        path, examples, title, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.draw`.
        """
        self.picture.draw(path, examples, list(metrics.lines()), title)


@dataclass(frozen=True, kw_only=True)
class ClassifierJob(Job):
    """Training job of a classifier, evaluated after every epoch or every ``--evaluate-every`` epochs."""

    picture: ResultFigure
    shown_samples: Callable[[int], Sequence[int]]
    """Returns the samples to draw, given the number of samples."""
    example_values: Callable[[Any, str, int], NDArray[Any]]
    """Returns the values to draw for a sample of a group. Collective."""
    class_name: Callable[[Any, int], object] = lambda samples, label: samples.class_names[label]
    """Returns the name of a class, given the samples and the label."""
    no_test_message: str
    further_results: Callable[[argparse.Namespace, Any], dict[str, Any]]
    """Returns further results, given the options and the samples."""
    baselines: Callable[[Any], dict[str, float]] | None = None
    """Returns accuracies of simpler predictors on the held-out samples, given the trainer. Collective."""

    def after_epoch(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> None:
        """Evaluate on the held-out samples, if there are any and this epoch is due.

        Parameters
        ----------
        options, trainer, metrics
            As in :meth:`distconv.jobs.training.job.Job.after_epoch`.
        """
        if "test" in trainer.samples.groups and trainer.epoch % getattr(options, "evaluate_every", 1) == 0:
            _evaluate_and_log(trainer, metrics, "test")

    def evaluate(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> ClassifierScores:
        """Return the scores of all groups and of the baselines. Collective.

        Parameters
        ----------
        options, trainer, metrics
            As in :meth:`distconv.jobs.training.job.Job.evaluate`.

        Returns
        -------
        ClassifierScores
        """
        samples = trainer.samples
        scores = {group: _evaluate_and_log(trainer, metrics, group) for group in samples.groups}
        more = self.further_results(options, samples)
        baselines: dict[str, float] = {}
        if self.baselines is not None:
            baselines = self.baselines(trainer) if "test" in samples.groups else {}
            more |= {"baselines": baselines}
        return ClassifierScores(
            scores=scores,
            baselines=baselines,
            further_results=more,
            no_test_message=self.no_test_message,
            picture=self.picture,
        )

    def examples(self, trainer: Any, outcome: Any) -> list[ClassifiedExample]:
        """Return examples with the predicted classes, held-out ones if there are any. Collective.

        Parameters
        ----------
        trainer, outcome
            As in :meth:`distconv.jobs.training.job.Job.examples`.

        Returns
        -------
        list of ClassifiedExample
        """
        samples, group = trainer.samples, list(outcome.scores)[-1]
        labels, examples = samples.groups[group].labels, []
        wanted = set(self.shown_samples(len(labels)))
        # Labels and logits are the same on all ranks, so all of them leave this collective loop after the same batch.
        for batch, logits in trainer.predictions(group):
            for sample, guess in zip(batch.samples, logits.argmax(1).tolist(), strict=False):
                if sample in wanted:
                    names = (self.class_name(samples, int(label)) for label in (labels[sample], guess))
                    examples.append(ClassifiedExample(self.example_values(samples, group, sample), *names))
            if len(examples) == len(wanted):
                break
        return examples


def _evaluate_and_log(trainer: Classifier, metrics: Metrics, group: str) -> Score:
    """Return the score of a group and write it to metrics.jsonl. Collective."""
    outcome = trainer.evaluate(group)
    metrics.write(step=trainer.step_count, evaluation=group, accuracy=outcome.accuracy, **asdict(outcome))
    return outcome
