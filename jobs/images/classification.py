"""Training of a classifier on labelled images.

The ``classify`` command calls it. The loop, the loss and checkpoints are those of :mod:`distconv.jobs.training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.loader import EpochLoader
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.accumulation import accumulate_batches
from distconv.jobs.training.classifier import Classifier
from distconv.jobs.training.model_factory import ModelError, build_classifier
from distconv.jobs.training.pipelines.options import Pipelining
from distconv.jobs.training.pipelines.stages import balanced_cuts
from distconv.jobs.training.pipelines.training import PipelineTrainer as AnyPipelineTrainer
from distconv.plan import Plan

from .samples import ImageSamples


@dataclass(frozen=True)
class ImageSettings(common.TrainingSettings):
    """Settings of a classifier's training."""

    model: str = "lenet5"
    batch: int = 128
    epochs: int = 4
    lr: float = 0.05
    augment: str = ""
    """Augmentations, ``crop``, ``flip`` or both, separated by a comma."""


class _Images(Classifier):
    """Parts that :class:`ImageTrainer` and :class:`ImagePipelineTrainer` share."""

    settings: ImageSettings
    samples: ImageSamples

    @property
    def notes(self) -> dict[str, Any]:
        """Task, number of classes, and normalization."""
        moments = self.samples.moments
        scales = {"mean": moments.mean.tolist(), "std": moments.std.tolist()}
        return {"task": "classify", "classes": self.samples.classes, **scales}

    def batches_of(self, group: str) -> EpochLoader:
        """Return a loader of ``train`` or ``test`` in order, without augmentation."""
        more = self.settings.evaluation_options(self.device) | self.image_format
        return self.samples.loader(group, self.grid, self.settings.batch, **more)

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raise ModelError unless the logits have at least as many classes as the samples."""
        _check_logits(logits, self.settings, self.samples)

    @property
    def image_dims(self) -> int:
        """Number of dimensions of a batch of images."""
        return 1 + len(self.samples.extents)

    def _take_samples(self, samples: ImageSamples) -> None:
        settings, self.samples = self.settings, samples
        more = settings.loader_options(self.device) | self.image_format
        parts = samples.loader(
            "train", self.grid, settings.part_size, seed=settings.seed, augment=settings.augment, **more
        )
        self.loader = accumulate_batches(parts, settings.accumulate)


class ImageTrainer(_Images, training.Trainer):
    """Training of a classifier over a process grid or with a plan. Collective: construct on every rank."""

    def __init__(
        self, settings: ImageSettings, samples: ImageSamples, grid_or_plan: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        super().__init__(settings, _model(settings, samples), grid_or_plan, samples.comm, device)
        self._take_samples(samples)


class ImagePipelineTrainer(_Images, AnyPipelineTrainer):
    """Training of a classifier as a pipeline. Collective: construct on every rank."""

    def __init__(
        self, settings: ImageSettings, samples: ImageSamples, pipelining: Pipelining, device: str = "cpu"
    ) -> None:
        model = _model(settings, samples).to(device, common.dtype_of(settings))
        _check_one_image(model, settings, samples, device)
        super().__init__(
            settings,
            model,
            lambda micro_batch, replicas: balanced_cuts(model, (micro_batch, *samples.extents), replicas),
            pipelining,
            samples.comm,
            device=device,
            example=torch.empty(2, *samples.extents, dtype=common.dtype_of(settings), device=device),
        )
        self._take_samples(samples)


def _model(settings: ImageSettings, samples: ImageSamples) -> torch.nn.Module:
    return build_classifier(
        settings.model,
        samples.comm,
        seed=settings.seed,
        in_channels=samples.extents[0],
        classes=samples.classes,
        width=settings.width,
    )


def _check_logits(logits: torch.Tensor, settings: ImageSettings, samples: ImageSamples) -> None:
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else (type(logits).__name__,)
    if len(shape) != 2 or shape[1] < samples.classes:
        raise ModelError(
            f"--model {settings.model}: the outputs for images of {samples.extents} are {shape}, but a "
            f"classifier returns (samples, classes) with at least {samples.classes} classes. Change the model "
            "or --classes."
        )


@torch.no_grad()
def _check_one_image(model: torch.nn.Module, settings: ImageSettings, samples: ImageSamples, device: str) -> None:
    """Run the model on one image on all ranks: an error inside a pipeline would occur on the rank of one stage only."""

    def attempt() -> None:
        zeros = torch.zeros(1, *samples.extents, dtype=common.dtype_of(settings), device=device)
        try:
            logits = model.eval()(zeros)
        except Exception as error:
            raise ModelError(
                f"--model {settings.model} fails on images of {samples.extents}: {type(error).__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error
        _check_logits(logits, settings, samples)

    try_on_all_ranks(samples.comm, attempt, ModelError)
