"""Train a sparse network to tell the classes of point clouds: of a file, a folder of OFF meshes, or embedded shapes.

Writes to the folder --out: metrics.jsonl (a line per step and per epoch's accuracy on held-out clouds), checkpoints,
summary.json, and result.png. At the end a majority vote and a perceptron on single points are judged on the same
held-out clouds. The grid splits samples (n) and space (d, h, w) and changes nothing but the order of sums; --pipeline
splits the layers (docs/pipelines.md).
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from distconv.communication.agreement import together
from distconv.errors import DataError, GridError
from distconv.grid import ProcessGrid
from distconv.jobs.pointcloud.baselines import perceptron
from distconv.jobs.pointcloud.classification.picture import Example, draw
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.classification.trainer import NETWORKS, Classifier, PipelineTrainer, Settings, Trainer
from distconv.jobs.training.options import add_training_arguments, device_for, place_of, positive, settings_of
from distconv.jobs.training.outcome import Outcome, majority_vote, report, write_score
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
  distconv train pointcloud
  mpiexec -n 2 distconv train pointcloud --grid n=2 --out runs/shapes
  mpiexec -n 2 distconv train pointcloud --grid n=2 --out runs/shapes --resume
  mpiexec -n 4 distconv train pointcloud --data modelnet10.h5 --model vgg16_bn --width 16 --grid n=2,d=2 --keep 0.5
  mpiexec -n 3 distconv train pointcloud --model vgg16_bn --pipeline 1f1b-so --microbatches 4
  mpiexec -n 2 distconv train pointcloud --pipeline pipedream --ppv 9 --switch-after 200
"""

SHOWN_CLOUDS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv train pointcloud``."""
    defaults = Settings()
    add_cloud_arguments(parser, defaults)
    add_pipeline_arguments(parser, add_training_arguments(parser, defaults, out="runs/pointcloud"))


def add_cloud_arguments(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """The clouds, how they become voxels, and the network."""
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="HDF5 file or folder of OFF meshes (default: embedded shapes)"
    )
    parser.add_argument("--model", choices=NETWORKS, default=defaults.model, help="default: %(default)s")
    parser.add_argument(
        "--resolution", type=positive, default=defaults.resolution, help="voxels along each side (default: %(default)s)"
    )
    parser.add_argument(
        "--points", type=positive, default=defaults.points, help="drawn of a cloud in each epoch (default: %(default)s)"
    )
    parser.add_argument(
        "--keep", type=share, default=defaults.keep, help="share of them that is trained on (default: %(default)s)"
    )


def share(text: str) -> float:
    """A number above 0, at most 1.

    Raises
    ------
    ArgumentTypeError
        If the text is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD.

    Raises
    ------
    GridError
        If a plan is asked for.
    """
    comm = MPI.COMM_WORLD
    place = pipelining_of(options, comm.size) or planned_pipelining(options, comm) or place_of(options, comm)
    if not isinstance(place, (Pipelining, ProcessGrid)):
        raise GridError("--plan: the layers of a sparse network are all on one grid; give it with --grid")
    device = device_for(options.device, comm)
    begin = time.perf_counter()
    with closing(CloudSamples(options.data, comm)) as samples:
        settings = settings_of(options, Settings)
        trainer: Classifier
        if isinstance(place, Pipelining):
            trainer = PipelineTrainer(settings, samples, place, device)
        else:
            trainer = Trainer(settings, samples, place, device)
        resumed = prepare(options, trainer)
        if comm.rank == 0:
            print(announcement(trainer, f"{trainer.loader.points} points, {samples.name}", resumed), flush=True)
        with Metrics(Path(options.out), trainer) as metrics:
            take_steps(options, trainer, metrics, lambda: _after_epoch(trainer, metrics))
            training_s = time.perf_counter() - begin
            scores = {group: _evaluate(trainer, metrics, group) for group in samples.groups}
            baselines = _baselines(trainer)
            total_s = time.perf_counter() - begin
            outcome = Outcome(scores=scores, baselines=baselines, training_s=training_s, total_s=total_s)
            _report(trainer, metrics, outcome)
        trainer.close()
    return 0


def _after_epoch(trainer: Classifier, metrics: Metrics) -> None:
    if "test" in trainer.samples.groups:
        _evaluate(trainer, metrics, "test")


def _evaluate(trainer: Classifier, metrics: Metrics, group: str) -> Score:
    score = trainer.evaluate(group)
    write_score(trainer, metrics, group, score)
    return score


def _baselines(trainer: Classifier) -> dict[str, float]:
    """What the network has to beat on the held-out clouds. Collective; every rank computes all of it.

    The perceptron trains for as many epochs as the network.
    """
    groups = trainer.samples.groups
    if "test" not in groups:
        return {}
    train, test = groups["train"], groups["test"]
    if trainer.comm.rank == 0:
        print(f"training what it is compared with: a perceptron, {max(1, trainer.epoch)} epochs", flush=True)
    learn = partial(perceptron, train, test, epochs=max(1, trainer.epoch), seed=trainer.settings.seed)
    return {
        "majority vote": majority_vote(train.labels, test.labels),
        "perceptron on points": together(trainer.comm, learn, DataError),
    }


def _report(trainer: Classifier, metrics: Metrics, outcome: Outcome) -> None:
    """Print, write summary.json and draw the picture. Collective."""
    examples = _examples(trainer)
    more = {"classes": trainer.samples.class_names, "baselines": outcome.baselines}
    report(
        trainer,
        metrics,
        outcome,
        more,
        no_test="no held-out clouds to test on",
        draw=lambda path, lines, title: draw(path, examples, lines, title),
    )


def _examples(trainer: Classifier) -> list[Example]:
    """The first clouds, held-out ones if there are any, with the classes the network gives them. Collective."""
    group = "test" if "test" in trainer.samples.groups else "train"
    clouds, names = trainer.samples.groups[group], trainer.samples.class_names
    batch, logits = next(trainer.predictions(group))
    found = zip(batch.samples[:SHOWN_CLOUDS], logits.argmax(1).tolist(), strict=False)
    return [Example(np.asarray(clouds[i].points), names[clouds[i].label], names[guess]) for i, guess in found]
