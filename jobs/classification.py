"""Training of a classifier on labelled images: its loss, its accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.loader import Batch
from distconv.plan import Plan
from distconv.tensor import gather

from . import training
from .image_samples import ImageSamples
from .model_factory import ModelError, build_classifier


@dataclass(frozen=True)
class Settings(training.Settings):
    """What the numbers of a classifier's training depend on."""

    model: str = "lenet5"
    batch: int = 128
    epochs: int = 4
    lr: float = 0.05
    augment: str = ""
    """``crop``, ``flip``, or both with a comma."""


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


class Trainer(training.Trainer):
    """A classifier in training on images."""

    def __init__(
        self, settings: Settings, samples: ImageSamples, place: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        model = build_classifier(
            settings.model,
            samples.comm,
            seed=settings.seed,
            in_channels=samples.extents[0],
            classes=samples.classes,
            width=settings.width,
        )
        super().__init__(settings, model, place, samples.comm, device)
        self.samples = samples
        self.loader = samples.loader(
            "train",
            self.grid,
            settings.batch,
            dtype=self.dtype,
            device=device,
            seed=settings.seed,
            shuffle=True,
            augment=settings.augment,
            drop_last=settings.drop_last,
        )

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._check_logits(outputs)
        return F.cross_entropy(outputs, labels)

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in the file's order, with all their logits (N, classes) on every rank."""
        self.model.eval()
        loader = self.samples.loader(group, self.grid, self.settings.batch, dtype=self.dtype, device=self.device)
        for batch in loader.epoch(0):
            logits = self.model(batch.tensors[0])
            self._check_logits(logits)
            yield batch, gather(logits).cpu()

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the samples of ``train`` or ``test``, without augmentation. Collective.

        Raises
        ------
        DataError
            On all ranks, if the loss on a batch is not finite.
        """
        of = self.samples.groups[group]
        correct, total = 0, 0.0
        for batch, logits in self.predictions(group):
            labels = torch.from_numpy(of.labels[list(batch.samples)])
            loss = float(F.cross_entropy(logits.double(), labels, reduction="sum"))
            if not math.isfinite(loss):
                raise DataError(
                    f"{of.source.path}: the loss on samples {batch.samples[0]} to {batch.samples[-1]} of {group!r} is "
                    f"{loss}; look for NaN in them"
                )
            total += loss
            correct += int((logits.argmax(1) == labels).sum())
        return Score(len(of.labels), correct, total / len(of.labels))

    def _check_logits(self, logits: torch.Tensor) -> None:
        classes = self.samples.classes
        if logits.dim() != 2 or logits.shape[1] < classes:
            raise ModelError(
                f"--model {self.settings.model} gives {tuple(logits.shape)} for images of {self.samples.extents}; a "
                f"classifier gives (samples, classes) with at least {classes} classes"
            )
