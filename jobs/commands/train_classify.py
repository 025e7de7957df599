"""Train a network to classify images: embedded digits, MNIST, CIFAR-10, or HDF5 files of your own.

Writes to the folder --out: metrics.jsonl (a line per step and per evaluation), checkpoints, summary.json, and
result.png. Initial weights, the order of the samples and their augmentation follow from --seed alone: the grid changes
nothing but the order of floating-point sums.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.images.classification import Classifier, PipelineTrainer, Settings, Trainer
from distconv.jobs.images.picture import Example, draw
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.model_factory import CLASSIFIERS
from distconv.jobs.training.options import add_training_arguments, device_for, place_of, positive, settings_of
from distconv.jobs.training.outcome import Outcome, report, write_score
from distconv.jobs.training.pipeline_options import (
    Pipelining,
    add_pipeline_arguments,
    pipelining_of,
    planned_pipelining,
)
from distconv.jobs.training.report import Metrics, announcement
from distconv.jobs.training.run import prepare, take_steps
from distconv.jobs.training.score import Score

EXAMPLES = """\
examples:
  distconv train classify --data digits --model lenet5
  mpiexec -n 4 distconv train classify --data mnist --model lenet5 --grid n=2,h=2 --out runs/mnist
  mpiexec -n 4 distconv train classify --data cifar10 --model resnet20 --grid n=2,h=2 --augment \\
      --epochs 30 --lr 0.1 --weight-decay 1e-4 --out runs/cifar
  mpiexec -n 4 distconv train classify --data cifar10 --model vgg16_bn --plan plan.json
  mpiexec -n 4 distconv train classify --data images.h5 --model mypackage.nets:build --grid h=2,w=2
  mpiexec -n 3 distconv train classify --data cifar10 --model vgg16_bn --pipeline 1f1b-so --microbatches 8
  mpiexec -n 3 distconv train classify --data cifar10 --model resnet20 --pipeline stale --ppv 7,13 --switch-after 5000
  mpiexec -n 4 distconv train classify --data cifar10 --model resnet20 --batch 64 --pipeline-plan pipeline.json
  mpiexec -n 4 distconv train classify --data mnist --model lenet5 --out runs/mnist --resume
"""

AUGMENTATIONS = ("crop", "flip")
SHOWN_IMAGES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv train classify``."""
    defaults = Settings()
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder of MNIST or CIFAR-10 as downloaded, a CIFAR-10 batch, an HDF5 file, or digits: embedded images",
    )
    parser.add_argument("--test-data", type=Path, metavar="PATH", help="test images, where --data has none")
    parser.add_argument(
        "--image-name", default="image", metavar="NAME", help="HDF5 dataset of images (N, C, H, W) (default: image)"
    )
    parser.add_argument("--label-name", default="label", metavar="NAME", help="HDF5 dataset (N) (default: label)")
    parser.add_argument("--classes", type=positive, help="default: 10, or the largest label in HDF5 plus 1")
    parser.add_argument("--max-train-samples", type=positive, metavar="N", help="train on the first N images only")
    parser.add_argument(
        "--model",
        default=defaults.model,
        metavar="NAME",
        help=f"{', '.join(CLASSIFIERS)}; or your own as package.module:factory (default: %(default)s)",
    )
    parser.add_argument(
        "--augment",
        nargs="?",
        type=augmentation,
        const=",".join(AUGMENTATIONS),
        default=defaults.augment,
        metavar="crop,flip",
        help="crop: images move by up to 4 pixels; flip: left and right change sides at random (alone: both)",
    )
    parser.add_argument(
        "--evaluate-every", type=positive, default=1, metavar="EPOCHS", help="on the test images (default: %(default)s)"
    )
    add_pipeline_arguments(parser, add_training_arguments(parser, defaults, out="runs/classify"))


def augmentation(text: str) -> str:
    """Some of ``crop`` and ``flip``, in this order.

    Raises
    ------
    ArgumentTypeError
        If it is something else.
    """
    words = text.split(",") if text else []
    if not set(words) <= set(AUGMENTATIONS):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(AUGMENTATIONS)}")
    return ",".join(word for word in AUGMENTATIONS if word in words)


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--data`` is missing.
    """
    comm = MPI.COMM_WORLD
    if options.data is None:
        raise DataError(
            "train classify needs --data PATH: a folder of MNIST or CIFAR-10, an HDF5 file, or digits (embedded)"
        )
    place = pipelining_of(options, comm.size) or planned_pipelining(options, comm) or place_of(options, comm)
    device = device_for(options.device, comm)
    begin = time.perf_counter()
    with closing(_samples(options, comm)) as samples:
        settings = settings_of(options, Settings)
        trainer: Classifier
        if isinstance(place, Pipelining):
            trainer = PipelineTrainer(settings, samples, place, device)
        else:
            trainer = Trainer(settings, samples, place, device)
        resumed = prepare(options, trainer)
        if comm.rank == 0:
            print(announcement(trainer, " x ".join(map(str, samples.extents)), resumed), flush=True)
        with Metrics(Path(options.out), trainer) as metrics:
            take_steps(options, trainer, metrics, lambda: _evaluate(options, trainer, metrics))
            training_s = time.perf_counter() - begin
            scores: dict[str, Score] = {
                group: trainer.evaluate(group) for group in ("train", "test") if group in samples.groups
            }
            for group, score in scores.items():
                write_score(trainer, metrics, group, score)
            total_s = time.perf_counter() - begin
            _report(trainer, metrics, Outcome(scores=scores, training_s=training_s, total_s=total_s))
        trainer.close()
    return 0


def _samples(options: argparse.Namespace, comm: MPI.Intracomm) -> ImageSamples:
    return ImageSamples(
        options.data,
        comm,
        test_path=options.test_data,
        names=(options.image_name, options.label_name),
        classes=options.classes,
        limit=options.max_train_samples,
    )


def _evaluate(options: argparse.Namespace, trainer: Classifier, metrics: Metrics) -> None:
    if "test" in trainer.samples.groups and trainer.epoch % options.evaluate_every == 0:
        write_score(trainer, metrics, "test", trainer.evaluate("test"))


def _report(trainer: Classifier, metrics: Metrics, outcome: Outcome) -> None:
    """Print, write summary.json and draw the picture. Collective."""
    examples = _examples(trainer, list(outcome.scores)[-1])
    report(
        trainer,
        metrics,
        outcome,
        {"classes": trainer.samples.classes},
        no_test="no test images: give them with --test-data",
        draw=lambda path, lines, title: draw(path, examples, lines, title),
    )


def _examples(trainer: Classifier, group: str) -> list[Example]:
    """The first images of a group as they are in the file, with the classes the network gives them. Collective."""
    of = trainer.samples.groups[group]
    batch, logits = next(trainer.predictions(group))
    return [
        Example(trainer.samples.image(group, sample), int(of.labels[sample]), int(row.argmax()))
        for sample, row in zip(batch.samples[:SHOWN_IMAGES], logits, strict=False)
    ]
