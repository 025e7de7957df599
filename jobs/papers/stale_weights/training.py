"""One run of the staleness experiment: a network trained in one variant from one seed, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.settings import set_learning_rate
from distconv.layers.models import MODELS
from distconv.pipeline import schedule
from distconv.pipeline.reference.serial import SerialPipeline
from distconv.pipeline.schedules.memory import stale_fraction
from distconv.pipeline.splitting.split import split

from .recipes import MOMENTUM, RECIPES, TrainingVariant

TEST_BATCH = 500
"""Samples of a batch in evaluation. The accuracy does not depend on it."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W), channels last in memory (a third faster in ResNet-20), and labels (N)."""


@dataclass(frozen=True)
class TrainingRun:
    """Settings that determine the results of a run.

    They are stored with the results, and a run is not repeated if all of them are equal. A new setting that changes
    results must become a field, or results of other settings are reused.

    ``train`` and ``test`` are numbers of images. ``schedule`` is the number of iterations over which the learning rate
    falls, and ``data`` the name of the data set's folder or file.
    """

    network: str
    width: int | None
    variant: str
    seed: int
    iterations: int
    schedule: int
    batch: int
    data: str
    train: int
    test: int


def train(run: TrainingRun, samples: ImageSamples, test: Sequence[Pair], evaluations: int) -> dict[str, Any]:
    """Train with the settings of ``run``, and return the results.

    Training ends at the first loss that is not finite.

    Parameters
    ----------
    run : TrainingRun
    samples : ImageSamples
    test : sequence of Pair
        Test images and labels.
    evaluations : int
        Number of evaluations on the test images.

    Returns
    -------
    dict
        ``accuracy`` on the test images at the end, ``stale_share`` (fraction of stale weights), ``diverged_at`` (the
        iteration of a loss that is not finite, or None), ``curve`` and ``seconds``. ``curve`` has the iteration, the
        test accuracy, and the mean loss since the previous point, at evenly spaced iterations.
    """
    begin = time.perf_counter()
    model = build(run, samples)
    variant = TrainingVariant.parse(run.variant)
    stages = split(model, variant.placement) if variant.placement else [model]
    curve: list[tuple[int, float, float]] = []
    reported, diverged_at = 0, None
    for iteration, pipe in iterations_of(run, variant, stages, samples):
        # The newest known loss is that of an earlier iteration while mini-batches are in flight.
        if pipe.losses and not math.isfinite(pipe.losses[-1][1]):
            diverged_at = iteration
            break
        if iteration * evaluations // run.iterations > len(curve):
            losses = [loss for _, loss in pipe.losses[reported:]]
            reported += len(losses)
            curve.append((iteration, accuracy(model, test), sum(losses) / max(1, len(losses))))
    return {
        # The last iteration always ends with an evaluation.
        "accuracy": curve[-1][1] if diverged_at is None else accuracy(model, test),
        "stale_share": stale_share(stages),
        "diverged_at": diverged_at,
        "curve": curve,
        "seconds": time.perf_counter() - begin,
    }


def iterations_of(
    run: TrainingRun, variant: TrainingVariant, stages: list[nn.Module], samples: ImageSamples
) -> Iterator[tuple[int, SerialPipeline]]:
    """Train a network, and yield the number of iterations after each of them. The pipeline is empty after the last.

    Parameters
    ----------
    run : TrainingRun
    variant : TrainingVariant
    stages : list of torch.nn.Module
        Stages of the network.
    samples : ImageSamples

    Yields
    ------
    (int, SerialPipeline)
        Iterations so far, and the pipeline with its losses.
    """
    recipe, pipelined = RECIPES[run.network], variant.pipelined(run.iterations)
    pipe = pipeline(run, stages, "stash" if variant.stash else None)
    with closing(batches(run, samples)) as data:
        for iteration in range(run.iterations):
            if variant.hybrid and iteration == pipelined:
                # Drains the pipeline. With one micro-batch, as here, gpipe trains as without a pipeline (4.2).
                pipe.switch("gpipe")
            for optimizer in filter(None, pipe.optimizers):
                set_learning_rate(optimizer, recipe.rate_of(variant, iteration, run.iterations, run.schedule))
            pipe.step(*next(data))
            if iteration + 1 == run.iterations:
                pipe.drain()  # otherwise the last mini-batches would not update the weights of the first stages
            yield iteration + 1, pipe


def build(run: TrainingRun, samples: ImageSamples) -> nn.Module:
    """Return the network with weights that depend on the seed.

    Parameters
    ----------
    run : TrainingRun
    samples : ImageSamples

    Returns
    -------
    torch.nn.Module
    """
    torch.manual_seed(run.seed)
    sizes = {"in_channels": samples.extents[0], "classes": samples.classes}
    if run.width is not None:
        sizes["width"] = run.width
    return MODELS[run.network](**sizes).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def pipeline(run: TrainingRun, stages: list[nn.Module], weights: str | None) -> SerialPipeline:
    """Return the simulated pipeline that trains several stages with stale weights, or one stage without.

    Parameters
    ----------
    run : TrainingRun
    stages : list of torch.nn.Module
        Stages of the network.
    weights : str or None
        Weight policy of backward passes, ``"stash"`` or None for the newest weights.

    Returns
    -------
    SerialPipeline
    """
    recipe = RECIPES[run.network]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, recipe.rate, MOMENTUM, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
        )

    return SerialPipeline(stages, F.cross_entropy, optimizer, "stale" if len(stages) > 1 else "gpipe", weights=weights)


def batches(run: TrainingRun, samples: ImageSamples) -> Generator[Pair]:
    """Yield mini-batches endlessly. Their order and augmentation depend on the seed only.

    Parameters
    ----------
    run : TrainingRun
    samples : ImageSamples

    Yields
    ------
    Pair
    """
    loader = samples.loader(
        "train",
        ProcessGrid(samples.comm),
        run.batch,
        seed=run.seed,
        shuffle=True,
        augment=RECIPES[run.network].augment,
        drop_last=True,  # all iterations have the same number of samples, as the recipes assume
    )
    for epoch in count():
        yield from map(_pair, loader.epoch(epoch))


def held_out(samples: ImageSamples) -> list[Pair]:
    """Return all test images.

    Raises
    ------
    DataError
        If there are none.
    """
    if "test" not in samples.groups:
        raise DataError(f"--data {samples.groups['train'].source.path}: no test images. Add them to the data set.")
    return [_pair(batch) for batch in samples.loader("test", ProcessGrid(samples.comm), TEST_BATCH).epoch(0)]


def _pair(batch: Any) -> Pair:
    images, labels = batch.tensors
    return images.local.contiguous(memory_format=torch.channels_last), labels.local


@torch.no_grad()
def accuracy(model: nn.Module, test: Sequence[Pair]) -> float:
    """Return the fraction of the test images that the newest weights classify correctly.

    Parameters
    ----------
    model : torch.nn.Module
    test : sequence of Pair
        Test images and labels.

    Returns
    -------
    float
    """
    model.eval()
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
    model.train()
    return correct / sum(len(labels) for _, labels in test)


def stale_share(stages: Sequence[nn.Module]) -> float:
    """Return the paper's percentage of stale weights (4.1) as a fraction: those on all stages but the last."""
    weights = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    # The first mini-batches find the weights of their forward passes unchanged. 4 per stage fill the pipeline.
    return stale_fraction(schedule("stale", len(stages), 4 * len(stages)), weights)
