"""Training of a segmentation model on mesh-tangling samples: the model, its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.grid import ProcessGrid
from distconv.jobs.segmentation.loss import SegmentationLoss
from distconv.jobs.segmentation.scores import counts_here
from distconv.jobs.segmentation.trainer import SegmentationTraining
from distconv.jobs.training import settings as common
from distconv.layers.models import MODELS
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .samples import MeshSamples
from .scores import Histogram


@dataclass(frozen=True)
class MeshSettings(common.TrainingSettings):
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


def build(settings: MeshSettings) -> torch.nn.Module:
    """The model with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    factory = MODELS.get(settings.model, pixel_classifier)
    return factory() if settings.width is None else factory(width=settings.width)


class MeshTrainer(SegmentationTraining):
    """A segmentation model in training on mesh samples."""

    settings: MeshSettings
    samples: MeshSamples
    criterion = SegmentationLoss(1, dice=True)

    def __init__(
        self, settings: MeshSettings, samples: MeshSamples, place: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        super().__init__(settings, build(settings), samples, place, device, augment=settings.augment)

    @property
    def notes(self) -> dict[str, Any]:
        """The task, and how inputs are scaled."""
        moments = self.samples.moments
        return {"task": "mesh", "mean": moments.mean.tolist(), "std": moments.std.tolist()}

    def predicted(self, inputs: DistTensor) -> DistTensor:
        """The probability of each cell (N, H, W) to tangle."""
        probability = torch.sigmoid(super().predicted(inputs).squeeze(1))
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
