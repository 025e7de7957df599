"""Train a network to classify images: embedded digits, MNIST, CIFAR-10, or your own files.

Writes to the folder --out: metrics.jsonl (a line per step and per evaluation), checkpoints, summary.json, and
result.png. Initial weights, the order of the samples and their augmentation depend on --seed only. The grid changes
nothing but the order of floating-point sums.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.images.classification import ImagePipelineTrainer, ImageSettings, ImageTrainer
from distconv.jobs.images.picture import RESULT_FIGURE
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.classifier import ClassifierJob
from distconv.jobs.training.job import train
from distconv.jobs.training.memory_format import add_memory_format_argument
from distconv.jobs.training.model_factory import CLASSIFIERS
from distconv.jobs.training.options import add_reading_arguments, add_training_arguments, positive_int
from distconv.jobs.training.pipelines.options import add_pipeline_arguments

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv train classify``."""
    defaults = ImageSettings()
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="MNIST or CIFAR-10 folder as downloaded, CIFAR-10 batch, HDF5 file or another format of "
        "docs/how-to/data-formats.md, or the word digits for embedded images",
    )
    add_reading_arguments(parser)
    parser.add_argument("--test-data", type=Path, metavar="PATH", help="test images, if --data has none")
    parser.add_argument(
        "--image-name",
        default="image",
        metavar="NAME",
        help="name of the HDF5 dataset of images (N, C, H, W) (default: %(default)s)",
    )
    parser.add_argument(
        "--label-name",
        default="label",
        metavar="NAME",
        help="name of the HDF5 dataset of labels (N) (default: %(default)s)",
    )
    parser.add_argument(
        "--classes",
        type=positive_int,
        help="number of classes (default: 10, or for HDF5 files the largest label plus 1)",
    )
    parser.add_argument("--max-train-samples", type=positive_int, metavar="N", help="train on the first N images only")
    parser.add_argument(
        "--model",
        default=defaults.model,
        metavar="NAME",
        help=f"network: {', '.join(CLASSIFIERS)}, or your own as package.module:factory (default: %(default)s)",
    )
    parser.add_argument(
        "--augment",
        nargs="?",
        type=augmentation,
        const=",".join(AUGMENTATIONS),
        default=defaults.augment,
        metavar="crop,flip",
        help="random augmentation: crop shifts images by up to 4 pixels, flip mirrors left and right; without a "
        "value: both (default: no augmentation)",
    )
    parser.add_argument(
        "--evaluate-every",
        type=positive_int,
        default=1,
        metavar="EPOCHS",
        help="evaluate on the test images every EPOCHS epochs (default: %(default)s)",
    )
    add_pipeline_arguments(parser, add_training_arguments(parser, defaults, out="runs/classify"))
    add_memory_format_argument(parser)


def augmentation(text: str) -> str:
    """Parse augmentations separated by commas, and return them in the order ``crop``, ``flip``.

    Raises
    ------
    ArgumentTypeError
        If there is any other augmentation.
    """
    words = text.split(",") if text else []
    if not set(words) <= set(AUGMENTATIONS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {','.join(AUGMENTATIONS)}")
    return ",".join(word for word in AUGMENTATIONS if word in words)


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    return train(options, JOB)


def _samples(options: argparse.Namespace, comm: MPI.Intracomm) -> ImageSamples:
    if options.data is None:
        raise DataError(
            "--data: missing. Name a folder of MNIST or CIFAR-10, an HDF5 file, or digits (embedded images)."
        )
    return ImageSamples(
        options.data,
        comm,
        test_path=options.test_data,
        names=(options.image_name, options.label_name),
        classes=options.classes,
        limit=options.max_train_samples,
        readers=options.readers,
    )


JOB = ClassifierJob(
    settings=ImageSettings,
    samples=_samples,
    trainer=ImageTrainer,
    pipeline=ImagePipelineTrainer,
    extents=lambda trainer: " x ".join(map(str, trainer.samples.extents)),
    further_results=lambda options, samples: {"classes": samples.classes},
    no_test_message="no test images: give them with --test-data",
    picture=RESULT_FIGURE,
    shown_samples=lambda count: range(min(16, count)),
    example_values=lambda samples, group, sample: samples.image(group, sample),
    class_name=lambda samples, label: label,
)
