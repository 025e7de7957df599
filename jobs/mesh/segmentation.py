"""Training of a segmentation model on mesh-tangling samples.

The loop, the loss and checkpoints are shared with :mod:`distconv.jobs.segmentation`. The mesh-specific parts are the
models, the predicted probability and the scores by family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.grid import ProcessGrid
from distconv.jobs.segmentation.loss import SegmentationLoss
from distconv.jobs.segmentation.scores import is_counting_rank
from distconv.jobs.segmentation.trainer import SegmentationTraining
from distconv.jobs.training import settings as common
from distconv.layers.models import MODELS
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .samples import MeshSamples
from .scores import Histogram


@dataclass(frozen=True)
class MeshSettings(common.TrainingSettings):
    """Settings of a training on mesh samples."""

    model: str = "unet"
    batch: int = 4
    epochs: int = 60
    optimizer: str = "adamw"
    lr: float = 4e-3
    warm_up: float = 0.3
    weight_decay: float = 1e-2
    augment: bool = True


def pixel_classifier(width: int = 64, in_channels: int = 18, classes: int = 1) -> torch.nn.Module:
    """Return a perceptron with two hidden layers that is applied to single cells.

    Parameters
    ----------
    width : int
        Features of the hidden layers.
    in_channels, classes : int
        Numbers of input and output channels.

    Returns
    -------
    Module
        Maps (N, ``in_channels``, H, W) to logits (N, ``classes``, H, W).
    """
    return torch.nn.Sequential(
        torch.nn.Conv2d(in_channels, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, width, 1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(width, classes, 1),
    )


def build(settings: MeshSettings) -> torch.nn.Module:
    """Return the model with weights that depend on the seed alone.

    Parameters
    ----------
    settings : MeshSettings
        Model, width and seed. A name that is not in ``MODELS`` selects :func:`pixel_classifier`.

    Returns
    -------
    Module
        The model.
    """
    torch.manual_seed(settings.seed)
    factory = MODELS.get(settings.model, pixel_classifier)
    return factory() if settings.width is None else factory(width=settings.width)


class MeshTrainer(SegmentationTraining):
    """Training of a segmentation model on mesh samples. Collective: construct on every rank."""

    settings: MeshSettings
    samples: MeshSamples
    criterion = SegmentationLoss(1, dice=True)

    def __init__(
        self, settings: MeshSettings, samples: MeshSamples, grid_or_plan: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        super().__init__(settings, build(settings), samples, grid_or_plan, device, augment=settings.augment)

    @property
    def notes(self) -> dict[str, Any]:
        """Task and normalization."""
        moments = self.samples.moments
        return {"task": "mesh", "mean": moments.mean.tolist(), "std": moments.std.tolist()}

    def predict(self, inputs: DistTensor) -> DistTensor:
        """Return the probability (N, H, W) of each cell to tangle."""
        probability = torch.sigmoid(super().predict(inputs).squeeze(1))
        assert isinstance(probability, DistTensor)
        return probability

    def scores(self, group: str) -> Histogram:
        """Return the predicted probabilities of ``train`` or ``heldout`` as counts. Collective: call on every rank."""
        families = self.samples.families[group]
        histogram = Histogram(0.0, 1.0, sorted(set(families)))
        for batch, probability in self.predictions(group):
            labels = batch.tensors[1].redistribute(probability.dist).local.cpu().numpy()
            values = probability.local.cpu().numpy()
            mine = probability.box()[0]
            # Replicas would count their cells twice.
            if is_counting_rank(probability.dist):
                for row, sample in enumerate(batch.samples[mine.start : mine.stop]):
                    histogram.add(values[row], labels[row], families[sample])
        return histogram.sum_over(self.comm)
