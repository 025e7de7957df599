"""Training of a classifier on labelled images: its loss, its accuracy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from distconv.communication.agreement import together
from distconv.data.loader import Batch
from distconv.grid import ProcessGrid
from distconv.jobs.training import training
from distconv.jobs.training.model_factory import ModelError, build_classifier
from distconv.jobs.training.pipeline_options import Pipelining
from distconv.jobs.training.pipeline_stages import balanced_cuts
from distconv.jobs.training.pipeline_training import PipelineTrainer as AnyPipelineTrainer
from distconv.jobs.training.score import Score, score
from distconv.placement import gather
from distconv.plan import Plan

from .samples import ImageSamples


@dataclass(frozen=True)
class Settings(training.Settings):
    """What the numbers of a classifier's training depend on."""

    model: str = "lenet5"
    batch: int = 128
    epochs: int = 4
    lr: float = 0.05
    augment: str = ""
    """``crop``, ``flip``, or both with a comma."""


class Classifier(training.Training):
    """A classifier in training on images, however the ranks share the work."""

    settings: Settings
    samples: ImageSamples

    @abstractmethod
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in the file's order, with all their logits (N, classes) on every rank."""

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of logits (N, classes), once they are found to have as many classes as the samples."""
        self._check_logits(outputs)
        return F.cross_entropy(outputs, labels)

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the samples of ``train`` or ``test``, without augmentation. Collective.

        Raises
        ------
        DataError
            On all ranks, if the loss on a batch is not finite.
        """
        of = self.samples.groups[group]
        return score(
            of.source.path,
            group,
            (
                (batch.samples, torch.from_numpy(of.labels[list(batch.samples)]), logits)
                for batch, logits in self.predictions(group)
            ),
        )

    def _take_samples(self, samples: ImageSamples) -> None:
        self.samples = samples
        self.loader = samples.loader(
            "train",
            self.grid,
            self.settings.batch,
            dtype=self.dtype,
            device=self.device,
            seed=self.settings.seed,
            shuffle=True,
            augment=self.settings.augment,
            drop_last=self.settings.drop_last,
        )

    def _batches_of(self, group: str) -> Iterator[Batch]:
        loader = self.samples.loader(group, self.grid, self.settings.batch, dtype=self.dtype, device=self.device)
        return loader.epoch(0)

    def _check_logits(self, logits: torch.Tensor) -> None:
        _check_logits(logits, self.settings, self.samples)


class Trainer(Classifier, training.Trainer):
    """A classifier in training over a grid, or as a plan says."""

    def __init__(
        self, settings: Settings, samples: ImageSamples, place: ProcessGrid | Plan, device: str = "cpu"
    ) -> None:
        super().__init__(settings, _model(settings, samples), place, samples.comm, device)
        self._take_samples(samples)

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in the file's order, with all their logits (N, classes) on every rank."""
        self.model.eval()
        for batch in self._batches_of(group):
            logits = self.model(batch.tensors[0])
            self._check_logits(logits)
            yield batch, gather(logits).cpu()


class PipelineTrainer(Classifier, AnyPipelineTrainer):
    """A classifier in training as a pipeline."""

    def __init__(self, settings: Settings, samples: ImageSamples, pipelining: Pipelining, device: str = "cpu") -> None:
        model = _model(settings, samples).to(device, training.dtype_of(settings))
        _try_out(model, settings, samples, device)
        super().__init__(
            settings,
            model,
            lambda micro_batch, replicas: balanced_cuts(model, (micro_batch, *samples.extents), replicas),
            pipelining,
            samples.comm,
            device=device,
            example=torch.empty(2, *samples.extents, dtype=training.dtype_of(settings), device=device),
        )
        self._take_samples(samples)

    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in the file's order, with all their logits (N, classes) on every rank."""
        return self.outputs(self._batches_of(group), self._logits_of)

    def _logits_of(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch.tensors[0].local)
        self._check_logits(logits)
        return logits


def _model(settings: Settings, samples: ImageSamples) -> torch.nn.Module:
    return build_classifier(
        settings.model,
        samples.comm,
        seed=settings.seed,
        in_channels=samples.extents[0],
        classes=samples.classes,
        width=settings.width,
    )


def _check_logits(logits: torch.Tensor, settings: Settings, samples: ImageSamples) -> None:
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else (type(logits).__name__,)
    if len(shape) != 2 or shape[1] < samples.classes:
        raise ModelError(
            f"--model {settings.model} gives {shape} for images of {samples.extents}; a classifier gives (samples, "
            f"classes) with at least {samples.classes} classes"
        )


@torch.no_grad()
def _try_out(model: torch.nn.Module, settings: Settings, samples: ImageSamples, device: str) -> None:
    """Find on all ranks what would fail in a pass of a pipeline on one rank alone."""

    def attempt() -> None:
        zeros = torch.zeros(1, *samples.extents, dtype=training.dtype_of(settings), device=device)
        try:
            logits = model.eval()(zeros)
        except Exception as error:
            raise ModelError(
                f"--model {settings.model} fails on images of {samples.extents}: {type(error).__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error
        _check_logits(logits, settings, samples)

    together(samples.comm, attempt, ModelError)
