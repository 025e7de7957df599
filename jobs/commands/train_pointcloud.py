"""Train a sparse network to classify point clouds: from a file, a folder of meshes and point files, or embedded shapes.

Writes to the folder --out: metrics.jsonl (a line per step and per evaluation of the held-out clouds after an epoch),
checkpoints, summary.json, and result.png. At the end, the accuracy is compared with that of a majority vote and of a
perceptron on single points. The grid splits samples (n) and space (d, h, w) and changes nothing but the order of
floating-point sums. --pipeline splits the layers (docs/how-to/pipelines.md).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError
from distconv.jobs.pointcloud.baselines import perceptron
from distconv.jobs.pointcloud.classification.picture import RESULT_FIGURE
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.classification.trainer import NETWORKS, CloudPipelineTrainer, CloudSettings, CloudTrainer
from distconv.jobs.training.classifier import ClassifierJob, majority_vote
from distconv.jobs.training.job import train
from distconv.jobs.training.options import add_training_arguments, positive_int
from distconv.jobs.training.pipelines.options import add_pipeline_arguments

EXAMPLES = """\
examples:
  distconv train pointcloud
  mpiexec -n 2 distconv train pointcloud --grid n=2 --out runs/shapes
  mpiexec -n 2 distconv train pointcloud --grid n=2 --out runs/shapes --resume
  mpiexec -n 4 distconv train pointcloud --data modelnet10.h5 --model vgg16_bn --width 16 --grid n=2,d=2 --keep 0.5
  mpiexec -n 3 distconv train pointcloud --model vgg16_bn --pipeline 1f1b-so --microbatches 4
  mpiexec -n 2 distconv train pointcloud --pipeline pipedream --ppv 9 --switch-after 200
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv train pointcloud``."""
    defaults = CloudSettings()
    add_cloud_arguments(parser, defaults)
    add_pipeline_arguments(parser, add_training_arguments(parser, defaults, out="runs/pointcloud"))


def add_cloud_arguments(parser: argparse.ArgumentParser, defaults: CloudSettings) -> None:
    """Add the options of the clouds, their voxels, and the network.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    defaults : CloudSettings
        Default values.
    """
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="HDF5 file, or folder of OFF, PLY, NPY and NPZ files (default: embedded shapes)",
    )
    parser.add_argument("--model", choices=NETWORKS, default=defaults.model, help="network (default: %(default)s)")
    parser.add_argument(
        "--resolution",
        type=positive_int,
        default=defaults.resolution,
        help="voxels along each side (default: %(default)s)",
    )
    parser.add_argument(
        "--points",
        type=positive_int,
        default=defaults.points,
        help="points drawn from each cloud in each epoch (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=positive_fraction,
        default=defaults.keep,
        help="fraction of the drawn points that is kept in training (default: %(default)s)",
    )
    parser.add_argument(
        "--varied", action="store_true", help="draw the kept fraction between 0 and --keep for each cloud in each epoch"
    )


def positive_fraction(text: str) -> float:
    """Parse a number above 0 and at most 1.

    Raises
    ------
    ArgumentTypeError
        If the string is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    return train(options, JOB)


def _baselines(trainer: CloudTrainer | CloudPipelineTrainer) -> dict[str, float]:
    """Return the accuracies of simpler predictors on the held-out clouds. Collective.

    Every rank computes all of them. The perceptron trains for as many epochs as the network.
    """
    train, test = (trainer.samples.groups[group] for group in ("train", "test"))
    if trainer.comm.rank == 0:
        print(f"training the baseline: a perceptron, {max(1, trainer.epoch)} epochs", flush=True)
    learn = partial(perceptron, train, test, epochs=max(1, trainer.epoch), seed=trainer.settings.seed)
    return {
        "majority vote": majority_vote(train.labels, test.labels),
        "perceptron on points": try_on_all_ranks(trainer.comm, learn, DataError),
    }


JOB = ClassifierJob(
    settings=CloudSettings,
    samples=lambda options, comm: CloudSamples(options.data, comm),
    trainer=CloudTrainer,
    pipeline=CloudPipelineTrainer,
    one_grid="sparse network",
    extents=lambda trainer: f"{trainer.loader.points} points, {trainer.samples.name}",
    further_results=lambda options, samples: {"classes": samples.class_names},
    baselines=_baselines,
    no_test_message="no held-out clouds to test on",
    picture=RESULT_FIGURE,
    shown_samples=lambda count: range(min(8, count)),
    example_values=lambda samples, group, sample: np.asarray(samples.groups[group][sample].points),
)
