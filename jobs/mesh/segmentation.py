"""Training of a segmentation model on mesh-tangling samples: the model, its loss, its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from distconv.data.loader import Batch
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.layers.models import MODELS
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .samples import MeshSamples
from .scores import Histogram, counts_here


@dataclass(frozen=True)
class Settings(common.Settings):
    """What the numbers of a run on mesh samples depend on."""

    model: str = "unet"
    batch: int = 4
    epochs: int = 60
    optimizer: str = "adamw"
    lr: float = 4e-3
    warm_up: float = 0.3
    weight_decay: float = 1e-2
    augment: bool = True


def pixel_classifier(width: int = 64, in_channels: int = 18, classes: int = 1) -> torch.nn.Module:
    """A perceptron with two hidden layers that sees one cell at a time."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, classes, 1),
    )


def build(settings: Settings) -> torch.nn.Module:
    """The model with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    factory = MODELS.get(settings.model, pixel_classifier)
    return factory() if settings.width is None else factory(width=settings.width)


def segmentation_loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy, plus one minus the soft Dice coefficient of the mini-batch.

    The coefficient is F1 with probabilities in place of decisions: cross entropy alone leaves the rare positives out
    for long (Milletari et al., "V-Net", 3DV 2016, section 3).
    """
    logits = logits.squeeze(1)
    probability = torch.sigmoid(logits)
    dice = (2 * (probability * label).sum() + 1) / (probability.sum() + label.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, label) + 1 - dice


class Trainer(training.Trainer):
    """A segmentation model in training on mesh samples."""

    settings: Settings

    def __init__(
        self, settings: Settings, samples: MeshSamples, place: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        super().__init__(settings, build(settings), place, samples.comm, device)
        self.samples = samples
        more = {"seed": settings.seed, "augment": settings.augment, **settings.loading(device)}
        self.loader = samples.loader("train", self.grid, settings.batch, **more)

    @property
    def notes(self) -> dict[str, Any]:
        """The task, and how inputs are scaled."""
        return {"task": "mesh", "mean": self.samples.input.mean.tolist(), "std": self.samples.input.std.tolist()}

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The segmentation loss."""
        return segmentation_loss(outputs, labels)

    def predictions(self, group: str) -> Iterator[tuple[Batch, DistTensor]]:
        """Batches of ``train`` or ``heldout`` in the file's order, with probabilities (N, H, W). Collective."""
        loader = self.samples.loader(group, self.grid, self.settings.batch, **self.settings.evaluating(self.device))
        return self.outputs(loader.epoch(0), self._probability)

    def _probability(self, inputs: DistTensor) -> DistTensor:
        probability = torch.sigmoid(self.model(inputs).squeeze(1))
        assert isinstance(probability, DistTensor)
        return probability

    def scores(self, group: str) -> Histogram:
        """Probabilities that the model gives to the samples of ``train`` or ``heldout``, as counts. Collective."""
        families = self.samples.families[group]
        histogram = Histogram(0.0, 1.0, sorted(set(families)))
        for batch, probability in self.predictions(group):
            labels = batch.tensors[1].redistribute(probability.dist).local.cpu().numpy()
            values = probability.local.cpu().numpy()
            mine = probability.box()[0]
            if counts_here(probability.dist):
                for row, sample in enumerate(batch.samples[mine.start : mine.stop]):
                    histogram.add(values[row], labels[row], families[sample])
        return histogram.sum_over(self.comm)
