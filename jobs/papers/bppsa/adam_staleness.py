"""Figure 12: VGG-16 trained with Adam by PipeDream's pipeline of four stages and without one, top 1 and top 5.

The pipeline is simulated in one process, with the same results as over ranks.

Source: BPPSA, appendix C: ImageNet, batches of 32, Adam with rate 0.00003, 90 epochs in three runs of each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.papers.printed_tables import Rows
from distconv.jobs.papers.stale_weights.table import standard_error
from distconv.jobs.training.settings import set_learning_rate
from distconv.layers.models.vgg import vgg16_bn
from distconv.pipeline.reference.serial import SerialPipeline
from distconv.pipeline.splitting.split import split

from .training import Batch, batches

RATE, FALLS = 1e-3, (1 / 3, 2 / 3)
"""Learning rate of Adam, and fractions of the iterations at which it falls to a tenth.

Both are chosen here. At the paper's rate of 0.00003, so few iterations learn nothing. The paper mentions a "step decay"
without details.
"""

CUTS = (2, 4, 7)
"""Layers after which stages begin, counted from 1. The paper does not state them."""

SEEDS = (0, 1, 2)
SCHEDULES = {"baseline": "gpipe", "PipeDream": "pipedream"}
"""Schedule of the simulated pipeline. ``gpipe`` on one stage is training without a pipeline."""

PUBLISHED = (2.6, 1.9)
"""Points of top 1 and of top 5 that PipeDream loses."""


def table(path: Path, iterations: int, batch: int, width: int) -> Rows:
    """Print the accuracies of both for each seed, and the mean loss of accuracy by PipeDream, paired by seed.

    Parameters
    ----------
    path : pathlib.Path
        Data set.
    iterations : int
        Number of training iterations.
    batch : int
        Samples of a mini-batch.
    width : int
        Channels of the first layer.

    Returns
    -------
    list of dict
    """
    lost: list[list[float]] = []
    print(f"\nFigure 12, VGG-16-BN of width {width} on {path.name}, {iterations} iterations of {batch}, Adam {RATE:g}")
    print(f"{'seed':>4}" + "".join(f"{name:>20}" for name in SCHEDULES) + "  top 1 and top 5, %")
    rows: Rows = []
    with closing(ImageSamples(path, MPI.COMM_SELF)) as samples:
        group = "test" if "test" in samples.groups else "train"
        held_out = list(islice(batches(samples, group, batch), max(1, len(samples.groups[group].labels) // batch)))
        for seed in SEEDS:
            # A list, because both train on the same batches.
            data = list(islice(batches(samples, "train", batch, seed), iterations))
            scores = {}
            for name, schedule in SCHEDULES.items():
                torch.manual_seed(seed)
                model = vgg16_bn(width, samples.extents[0], samples.classes)
                train(model, schedule, data)
                scores[name] = accuracies(model, held_out)
            print(f"{seed:>4}" + "".join(f"{100 * a:>12.2f}{100 * b:>8.2f}" for a, b in scores.values()), flush=True)
            rows.append({"seed": seed, **scores})
            lost.append([plain - piped for plain, piped in zip(*scores.values(), strict=True)])
    for name, points, published in zip(("top 1", "top 5"), zip(*lost, strict=True), PUBLISHED, strict=True):
        mean, error = 100 * statistics.mean(points), 100 * (standard_error(points) or 0.0)
        print(f"{name}: PipeDream loses {mean:.2f} +- {error:.2f} points (the paper, on ImageNet: {published})")
    return rows


def train(model: nn.Module, schedule: str, data: Sequence[Batch]) -> None:
    """Train with the schedule's number of stages: four with stashed weights (PipeDream), or one.

    Parameters
    ----------
    model : torch.nn.Module
    schedule : str
        A value of ``SCHEDULES``.
    data : sequence of Batch
        Batches.
    """
    pipelined = schedule == "pipedream"
    stages = split(model, CUTS) if pipelined else [model]
    pipe = SerialPipeline(stages, F.cross_entropy, lambda parameters: torch.optim.Adam(parameters, RATE), schedule)
    for iteration, (images, labels) in enumerate(data):
        for optimizer in filter(None, pipe.optimizers):
            set_learning_rate(optimizer, RATE * 0.1 ** sum(iteration >= fall * len(data) for fall in FALLS))
        pipe.step(images, labels)
    # Otherwise the last mini-batches would not update the first stages.
    pipe.drain()


@torch.no_grad()
def accuracies(model: nn.Module, data: Sequence[Batch]) -> tuple[float, float]:
    """Return the top-1 and top-5 accuracy of ``model``, as fractions.

    Parameters
    ----------
    model : torch.nn.Module
    data : sequence of Batch
        Batches.

    Returns
    -------
    (float, float)
    """
    model.eval()
    first, five = 0, 0
    for images, labels in data:
        named = model(images).topk(5).indices == labels[:, None]
        first, five = first + int(named[:, 0].sum()), five + int(named.sum())
    count = sum(len(labels) for _, labels in data)
    return first / count, five / count
