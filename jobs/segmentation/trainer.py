"""Training of segmentation networks.

:class:`SegmentationTraining` is independent of where the samples come from; :mod:`distconv.jobs.mesh` derives from it.
:class:`SegmentationTrainer` trains on the user's data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from distconv.arrangement import parse_grid
from distconv.data.loader import Batch
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.accumulation import accumulate_batches
from distconv.jobs.training.model_factory import ModelError, build_segmenter
from distconv.layers.models import MODELS
from distconv.placement import gather
from distconv.plan import Plan
from distconv.tensor import DistTensor

from .loss import SegmentationLoss
from .samples import SegmentationSamples
from .scores import Confusion, SegmentationScores, is_counting_rank

LOSSES = ("cross-entropy", "cross-entropy+dice")
BALANCED = "balanced"
"""Value of ``class_weights`` that gives every class the same total weight."""
MODEL = {2: "unet", 3: "unet3d"}
"""Default model by number of spatial dimensions."""


@dataclass(frozen=True)
class SegmentationSettings(common.TrainingSettings):
    """Settings of a training on the user's images and label maps."""

    model: str = ""
    """Name of the network; by default a U-Net for the number of spatial dimensions."""
    batch: int = 2
    epochs: int = 20
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 1e-2
    loss: str = LOSSES[0]
    class_weights: str = ""
    """One number for each class, separated by commas, or ``balanced``."""
    ignore_label: int | None = None
    crop: str = ""
    """Size of the crops of training samples, written like a grid."""
    mirror: str = ""
    """Axes along which training samples are flipped at random."""


class SegmentationTraining(training.Trainer):
    """Training of a segmentation network on samples with label maps. Collective: construct on every rank."""

    samples: SegmentationSamples
    criterion: SegmentationLoss
    """Loss. The subclass sets it."""
    evaluated_at_once = 0
    """Samples in a mini-batch of an evaluation; 0 for as many as in a training step."""

    def __init__(
        self,
        settings: common.TrainingSettings,
        model: torch.nn.Module,
        samples: SegmentationSamples,
        grid_or_plan: ProcessGrid | Plan,
        device: str,
        **loading: Any,
    ) -> None:
        """Prepare training; ``loading`` holds the options of the training loader, such as its augmentations."""
        super().__init__(settings, model, grid_or_plan, samples.comm, device)
        self.samples = samples
        more = {"seed": settings.seed, **loading, **settings.loader_options(device), **self.image_format}
        self.loader = accumulate_batches(
            samples.loader("train", self.grid, settings.part_size, **more), settings.accumulate
        )

    @property
    def image_dims(self) -> int:
        """Number of dimensions of a batch of images."""
        return 2 + len(self.samples.axes)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the segmentation loss of network outputs.

        Parameters
        ----------
        outputs : Tensor
            Logits (N, C, ...).
        labels : Tensor
            Labels (N, ...).

        Returns
        -------
        Tensor
            The loss, a scalar.

        Raises
        ------
        ModelError
            If the outputs do not have the shape of logits for each class and pixel.
        """
        self._check_outputs(outputs, labels)
        return self.criterion(outputs, labels)

    def _check_outputs(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        wanted = (labels.shape[0], self.samples.classes, *labels.shape[1:])
        if not isinstance(outputs, torch.Tensor) or tuple(outputs.shape) != wanted:
            shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise ModelError(
                f"--model {self.settings.model}: the outputs for labels {tuple(labels.shape)} are {shape}, but a "
                f"segmentation network returns (samples, classes, ...), here {wanted}. Change the model or "
                "--classes."
            )

    def predictions(self, group: str) -> Iterator[tuple[Batch, DistTensor]]:
        """Yield the batches of a group in order, uncropped and not augmented, with :meth:`predict`. Collective."""
        batch = self.evaluated_at_once or self.settings.batch
        more = self.settings.evaluation_options(self.device) | self.image_format
        loader = self.samples.loader(group, self.grid, batch, **more)
        return self.outputs(loader.epoch(0), self.predict)

    def predict(self, inputs: DistTensor) -> DistTensor:
        """Return the logits (N, C, ...) of the trained network for a batch."""
        logits = self.evaluation_model(inputs)
        assert isinstance(logits, DistTensor)
        return logits


class SegmentationTrainer(SegmentationTraining):
    """Training of a network of the user's choice on the user's images and label maps."""

    settings: SegmentationSettings

    def __init__(
        self,
        settings: SegmentationSettings,
        samples: SegmentationSamples,
        grid_or_plan: ProcessGrid | Plan,
        device: str = "cpu",
    ) -> None:
        settings = replace(settings, model=settings.model or MODEL.get(len(samples.axes), ""))
        _check_axes(settings, samples)
        model = build(settings, samples)
        loading = {"mirror": settings.mirror, "crop": parse_grid(settings.crop) if settings.crop else None}
        super().__init__(settings, model, samples, grid_or_plan, device, **loading)
        weights = class_weights(settings.class_weights, samples)
        self.criterion = SegmentationLoss(
            samples.classes,
            settings.ignore_label,
            None if weights is None else torch.tensor(weights, dtype=self.dtype, device=device),
            dice=settings.loss == LOSSES[1],
        )
        if settings.crop:  # samples are evaluated uncropped: as few as possible at once
            self.evaluated_at_once = self.grid.shape["n"]

    @property
    def notes(self) -> dict[str, Any]:
        """Task, classes, names of the datasets, and normalization."""
        samples = self.samples
        train = samples.groups["train"]
        return {
            "task": "segmentation",
            "classes": samples.classes,
            "ignore": samples.ignore,
            "names": [name.rpartition("/")[2] for name in (train.image, train.label)],
            "mean": samples.moments.mean.tolist(),
            "std": samples.moments.std.tolist(),
        }

    def evaluate(self, group: str) -> tuple[SegmentationScores, float]:
        """Return the scores on a group and the loss over all its samples. Collective: call on every rank.

        The loss is that of a single mini-batch with all samples, so it is the same on every grid.

        Parameters
        ----------
        group : str
            Name of the group.

        Returns
        -------
        scores : SegmentationScores
            Identical on all ranks.
        loss : float
            Identical on all ranks.
        """
        confusion, sums = Confusion(self.samples.classes, self.samples.ignore), []
        for batch, logits in self.predictions(group):
            labels = training.match_grid(batch.tensors[1], logits)
            self._check_outputs(logits, labels)
            # In float64: float32 would lose the last pixels of a large group of samples.
            sums.append([gather(part).double().cpu() for part in self.criterion.sums(logits, labels)])
            predicted = predicted_classes(logits)
            here = batch.tensors[1].redistribute(predicted.dist).local
            if is_counting_rank(predicted.dist):
                confusion.add(predicted.local.cpu().numpy(), here.cpu().numpy())
        loss = self.criterion.from_sums(*(torch.stack(parts).sum(0) for parts in zip(*sums, strict=True)))
        return confusion.sum_over(self.comm), float(loss)


def predicted_classes(logits: DistTensor) -> DistTensor:
    """Return the classes (N, ...) that logits (N, C, ...) predict.

    The class of the largest logit. With one channel: 1 where the logit is not negative, otherwise 0.
    """
    predicted = (logits.squeeze(1) >= 0).long() if logits.shape[1] == 1 else logits.argmax(1)
    assert isinstance(predicted, DistTensor)
    return predicted


def build(settings: SegmentationSettings, samples: SegmentationSamples) -> torch.nn.Module:
    """Return the network with weights that depend on the seed alone. Collective: call on every rank.

    Parameters
    ----------
    settings : SegmentationSettings
        Model, width and seed.
    samples : SegmentationSamples
        The samples, which determine the numbers of input channels and classes.

    Returns
    -------
    Module
        The network.

    Raises
    ------
    ModelError
        On all ranks, if no network is named, or it is for another number of dimensions.
    """
    if not settings.model:
        raise ModelError(f"samples of {samples.extents}: no reference model. Name your own with --model.")
    reference = MODELS.get(settings.model)
    if reference is not None and len(reference.sample) != len(samples.extents):
        extents = len(reference.sample) - 1
        raise ModelError(
            f"--model {settings.model}: for samples with {extents} dimensions, but these are {samples.extents}"
        )
    return build_segmenter(
        settings.model,
        samples.comm,
        seed=settings.seed,
        in_channels=samples.extents[0],
        classes=samples.classes,
        width=settings.width,
    )


def class_weights(text: str, samples: SegmentationSamples) -> list[float] | None:
    """Return the weight of each class.

    Parameters
    ----------
    text : str
        One number for each class, separated by commas; ``balanced`` for weights that are inversely proportional to the
        number of training pixels of the class; empty for none.
    samples : SegmentationSamples
        The samples.

    Returns
    -------
    list of float, optional
        One weight for each class. None if ``text`` is empty.

    Raises
    ------
    DataError
        If the number of weights differs from the number of classes, or there is only one class.
    """
    if not text:
        return None
    places = samples.places
    if samples.classes == 1:
        raise DataError("--class-weights: a single class cannot be weighted. Use --classes 2.")
    if text == BALANCED:
        there = places > 0
        return [float(places.sum() / (there.sum() * count)) if count else 0.0 for count in places]
    weights = [float(word) for word in text.split(",")]
    if len(weights) != samples.classes:
        raise DataError(
            f"--class-weights {text}: {len(weights)} weights for {samples.classes} classes. Give one weight "
            "for each class."
        )
    return weights


def _check_axes(settings: SegmentationSettings, samples: SegmentationSamples) -> None:
    """Raise DataError if an augmentation names an axis that samples do not have."""
    cropped = parse_grid(settings.crop) if settings.crop else {}
    for option, axes in (("mirror", settings.mirror), ("crop", cropped)):
        for axis in axes:
            if axis not in samples.axes:
                raise DataError(f"--{option}: samples of {samples.extents} have the axes {samples.axes}, not {axis}")
