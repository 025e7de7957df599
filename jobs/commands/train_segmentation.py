"""Train a network to segment images or volumes: it predicts the class of each pixel or voxel.

Writes to the folder --out: metrics.jsonl (a line per step and per evaluation), checkpoints, summary.json, and
result.png. Initial weights, the order of the samples, their crops and flips depend on --seed only. The grid changes
nothing but the order of floating-point sums. ``distconv predict`` predicts with the trained network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.segmentation.picture import SegmentationExample, draw
from distconv.jobs.segmentation.samples import SegmentationSamples, open_samples
from distconv.jobs.segmentation.scores import SegmentationScores
from distconv.jobs.segmentation.trainer import (
    BALANCED,
    LOSSES,
    SegmentationSettings,
    SegmentationTrainer,
    predicted_classes,
)
from distconv.jobs.training.job import Job, JobOutcome, train
from distconv.jobs.training.memory_format import add_memory_format_argument
from distconv.jobs.training.model_factory import SEGMENTERS
from distconv.jobs.training.options import add_reading_arguments, add_training_arguments, grid_shape, positive_int
from distconv.jobs.training.report import Metrics
from distconv.jobs.training.training import Training
from distconv.placement import gather

EXAMPLES = """\
examples:
  distconv train segmentation --data cells.h5
  mpiexec -n 4 distconv train segmentation --data ct.zarr --model mypackage.nets:unet --grid d=2,h=2 --batch 1 \\
      --crop d=96,h=96,w=96 --mirror dhw --loss cross-entropy+dice --class-weights balanced --out runs/ct
  mpiexec -n 4 distconv train segmentation --data ct.zarr --model mypackage.nets:unet --out runs/ct --resume
  mpiexec -n 4 distconv predict runs/ct --data ct.zarr --window d=96,h=96,w=96 --out predicted
"""

SHOWN_SAMPLES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv train segmentation``."""
    defaults = SegmentationSettings()
    _add_data(parser)
    _add_network(parser, defaults)
    _add_augmentation(parser, defaults)
    parser.add_argument(
        "--evaluate-every",
        type=positive_int,
        default=1,
        metavar="EPOCHS",
        help="evaluate on the held-out samples every EPOCHS epochs (default: %(default)s)",
    )
    add_training_arguments(parser, defaults, out="runs/segmentation")
    add_memory_format_argument(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    """Add the files of samples and the names of their datasets."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="HDF5, netCDF or zarr file, or folder of .npy or HDF5 files (docs/how-to/data-formats.md), with datasets "
        "of images and labels at its top or in groups train and test",
    )
    add_reading_arguments(parser)
    parser.add_argument("--test-data", type=Path, metavar="PATH", help="held-out samples, if --data has none")
    parser.add_argument(
        "--image-name",
        default="image",
        metavar="NAME",
        help="name of the dataset of images (N, C, [D,] H, W) (default: %(default)s)",
    )
    parser.add_argument(
        "--label-name",
        default="label",
        metavar="NAME",
        help="name of the dataset of labels (N, [D,] H, W) (default: %(default)s)",
    )


def _add_network(parser: argparse.ArgumentParser, defaults: SegmentationSettings) -> None:
    """Add the model, its labels and its loss."""
    parser.add_argument(
        "--classes",
        type=positive_int,
        help="output channels of the network; 1: a single logit, of label 1 (default: the largest label plus 1)",
    )
    parser.add_argument(
        "--ignore-label",
        type=int,
        metavar="LABEL",
        help="label value that is excluded from loss and metrics (default: none)",
    )
    parser.add_argument(
        "--model",
        default=defaults.model,
        metavar="NAME",
        help=f"network: {', '.join(SEGMENTERS)}, or your own as package.module:factory (default: unet or unet3d)",
    )
    parser.add_argument("--loss", choices=LOSSES, default=defaults.loss, help="loss function (default: %(default)s)")
    parser.add_argument(
        "--class-weights",
        type=weights,
        default=defaults.class_weights,
        metavar=f"W,W,...|{BALANCED}",
        help="weight of each class in the cross entropy, or balanced: inversely proportional to its frequency "
        "(default: 1 each)",
    )


def _add_augmentation(parser: argparse.ArgumentParser, defaults: SegmentationSettings) -> None:
    """Add the random changes of samples."""
    parser.add_argument(
        "--crop",
        type=crop,
        default=defaults.crop,
        metavar="h=256,w=256",
        help="train on random crops of this size (default: full samples)",
    )
    parser.add_argument(
        "--mirror",
        type=mirror,
        default=defaults.mirror,
        metavar="dhw",
        help="axes along which samples are flipped at random (default: no flips)",
    )


def crop(text: str) -> str:
    """Check the size of a crop along axes, such as ``h=64,w=64``; an empty string stays empty.

    Raises
    ------
    ArgumentTypeError
        If the string is invalid.
    """
    return ",".join(f"{axis}={extent}" for axis, extent in grid_shape(text).items()) if text else ""


def mirror(text: str) -> str:
    """Parse axes to flip, and return them in the order ``d``, ``h``, ``w``.

    Raises
    ------
    ArgumentTypeError
        If there is any other axis.
    """
    if not set(text) <= set("dhw"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of the axes d, h and w, such as hw")
    return "".join(axis for axis in "dhw" if axis in text)


def weights(text: str) -> str:
    """Check class weights: numbers that are not negative, separated by commas, or ``balanced``.

    Raises
    ------
    ArgumentTypeError
        If the string is neither, or all weights are 0.
    """
    if text in ("", BALANCED):
        return text
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {BALANCED} nor a list of non-negative numbers, such as 1,2.5"
        )
    return ",".join(map(str, numbers))


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    return train(options, JOB)


def _samples(options: argparse.Namespace, comm: MPI.Intracomm) -> SegmentationSamples:
    if options.data is None:
        raise DataError("--data: missing. Name a file or folder with datasets of images and labels.")
    return open_samples(
        options.data,
        comm,
        test_path=options.test_data,
        names=(options.image_name, options.label_name),
        classes=options.classes,
        ignore=options.ignore_label,
        readers=options.readers,
    )


@dataclass(frozen=True, kw_only=True)
class SegmentationOutcome(JobOutcome):
    """Scores of the network on held-out samples, or on the training samples if there are none."""

    group: str
    scores: SegmentationScores
    classes: int
    ignore: int | None

    @property
    def results(self) -> dict[str, Any]:
        """Scores for summary.json."""
        return {"classes": self.classes, "group": self.group, **self.scores.results}

    @property
    def title(self) -> str:
        """Mean Dice coefficient."""
        mean = self.scores.results["mean_dice"]
        return "" if mean is None else f"{self.group} Dice {mean:.3f}"

    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print a line.

        Parameters
        ----------
        trainer, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.show`.
        """
        print(f"{self.group}: {self.scores}")
        if self.group == "train":
            print("no held-out samples: give them with --test-data, or in a group test")

    def draw(self, path: Path, examples: Sequence[SegmentationExample], title: str, metrics: Metrics) -> None:
        """Draw the curves of the training and the examples.

        Parameters
        ----------
        path, examples, title, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.draw`.
        """
        draw(path, examples, list(metrics.lines()), classes=self.classes, ignore=self.ignore, title=title)


class SegmentationJob(Job):
    """Training job of a segmentation network, evaluated after every epoch or every ``--evaluate-every`` epochs."""

    def after_epoch(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> None:
        """Evaluate on the held-out samples, if there are any and this epoch is due.

        Parameters
        ----------
        options, trainer, metrics
            As in :meth:`distconv.jobs.training.job.Job.after_epoch`.
        """
        if "test" in trainer.samples.groups and trainer.epoch % options.evaluate_every == 0:
            _evaluate_and_log(trainer, metrics, "test")

    def evaluate(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> SegmentationOutcome:
        """Return the scores on held-out samples, or on the training samples if there are none. Collective.

        Parameters
        ----------
        options, trainer, metrics
            As in :meth:`distconv.jobs.training.job.Job.evaluate`.

        Returns
        -------
        SegmentationOutcome
        """
        samples = trainer.samples
        group = "test" if "test" in samples.groups else "train"
        scores = _evaluate_and_log(trainer, metrics, group)
        return SegmentationOutcome(group=group, scores=scores, classes=samples.classes, ignore=samples.ignore)

    def examples(self, trainer: Any, outcome: Any) -> list[SegmentationExample]:
        """Return the first samples of a group, on every rank. Collective.

        Parameters
        ----------
        trainer, outcome
            As in :meth:`distconv.jobs.training.job.Job.examples`.

        Returns
        -------
        list of SegmentationExample
        """
        examples: list[SegmentationExample] = []
        for batch, logits in trainer.predictions(outcome.group):
            image, label = batch.tensors
            maps = [_slices(each) for each in (image[:, 0], label, predicted_classes(logits))]
            examples += [
                SegmentationExample(f"sample {number}", *each)
                for number, *each in zip(batch.samples, *maps, strict=True)
            ]
            if len(examples) >= SHOWN_SAMPLES:  # on all ranks after the same batch
                break
        return examples[:SHOWN_SAMPLES]


def _slices(values: Any) -> Any:
    """Return maps (N, H, W) of values (N, [D, [H,]] W); of volumes, the middle slice. Collective."""
    if values.dim() == 4:
        values = values[:, values.shape[1] // 2]
    whole = np.asarray(gather(values).cpu())
    return whole[:, None] if whole.ndim == 2 else whole


def _evaluate_and_log(trainer: SegmentationTrainer, metrics: Metrics, group: str) -> SegmentationScores:
    """Return the scores of a group and write them to metrics.jsonl. Collective."""
    scores, loss = trainer.evaluate(group)
    metrics.write(step=trainer.step_count, evaluation=group, loss=loss, **scores.results)
    return scores


JOB = SegmentationJob(
    settings=SegmentationSettings,
    samples=_samples,
    trainer=SegmentationTrainer,
    extents=lambda trainer: " x ".join(map(str, trainer.samples.extents)),
)
