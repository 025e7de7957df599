"""Baselines: constant answers, one channel, frozen velocities, a perceptron on single cells.

The command that trains on mesh samples compares the network with them. Thresholds are fitted on training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.channel_statistics import chunk_aligned_boxes
from distconv.errors import DataError
from distconv.grid import ProcessGrid

from .recipe import CHANNELS
from .samples import MeshSamples
from .scores import BINS, Histogram, PredictorScore, Threshold, score_predictor
from .segmentation import MeshSettings, MeshTrainer

PIXEL_RATE = 1e-2
"""Learning rate of the perceptron. A rate of 3e-2 gives the same result on validation samples."""

GROUPS = ("train", "heldout")
Values = NDArray[Any]


def constant_answers(samples: MeshSamples) -> list[PredictorScore]:
    """Return the scores of "all cells negative" and "all cells positive". Collective: call on every rank.

    Parameters
    ----------
    samples : MeshSamples
        Opened with ``extrapolated=True``.

    Returns
    -------
    list of PredictorScore
        The two scores.
    """
    train, heldout = (
        _count_scores(samples, group, lambda label, _: np.zeros(label.shape), low=0, high=1, bins=2) for group in GROUPS
    )
    never, always = Threshold(2, True, 1.0), Threshold(0, True, 0.0)
    return [
        score_predictor("all negative", train, heldout, never),
        score_predictor("all positive", train, heldout, always),
    ]


def best_channel(samples: MeshSamples) -> PredictorScore:
    """Return the score of the single channel with the highest training F1. Collective: call on every rank.

    Channel, threshold and its direction are fitted on the training samples.

    Parameters
    ----------
    samples : MeshSamples
        The samples.

    Returns
    -------
    PredictorScore
        The score.
    """
    moments = samples.moments
    train, heldout = (
        [Histogram(lo, hi, _families(samples, group)) for lo, hi in zip(moments.low, moments.high, strict=True)]
        for group in GROUPS
    )
    for group, histograms in (("train", train), ("heldout", heldout)):
        _count_channels(samples, group, histograms)
    thresholds = [histogram.best_threshold(both_directions=True) for histogram in train]
    best = int(np.argmax([h.f1(t) for h, t in zip(train, thresholds, strict=True)]))
    return score_predictor(f"channel {CHANNELS[best]!r}", train[best], heldout[best], thresholds[best])


def extrapolation(samples: MeshSamples, q_star: float) -> list[PredictorScore]:
    """Return the scores of Jacobians extrapolated with constant node velocities. Collective: call on every rank.

    Parameters
    ----------
    samples : MeshSamples
        Opened with ``extrapolated=True``.
    q_star : float
        The threshold of the labels.

    Returns
    -------
    list of PredictorScore
        With a fitted threshold, and with ``q_star``.
    """
    counted = [
        _count_scores(samples, group, lambda _, jacobian: jacobian, low=-1.0, high=1.0, bins=BINS) for group in GROUPS
    ]
    fitted = counted[0].best_threshold(both_directions=True)
    # The score is the prediction itself: bin 0 counts the cells predicted negative, bin 1 those predicted positive.
    below = [
        _count_scores(samples, group, lambda _, jacobian: jacobian < q_star, low=0, high=1, bins=2) for group in GROUPS
    ]
    at_q = score_predictor("frozen velocities, at q*", below[0], below[1], Threshold(1, True, q_star))
    named = PredictorScore(at_q.name, f"< {q_star:.3g}", at_q.training, at_q.heldout, at_q.families)
    return [score_predictor("frozen velocities, fitted", counted[0], counted[1], fitted), named]


def perceptron(samples: MeshSamples, grid: ProcessGrid, settings: MeshSettings) -> PredictorScore:
    """Train a perceptron on the 18 channels of single cells, and return its score. Collective: call on every rank.

    Parameters
    ----------
    samples : MeshSamples
        The samples.
    grid : ProcessGrid
        The grid of the training.
    settings : MeshSettings
        Settings of the network to compare with. The perceptron has another model and learning rate.

    Returns
    -------
    PredictorScore
        The score.
    """
    settings = replace(settings, model="perceptron", width=None, lr=PIXEL_RATE)
    trainer = MeshTrainer(settings, samples, grid)
    for batch in trainer.batches():
        trainer.step(*batch.tensors)
    return score_predictor("perceptron on one cell", trainer.scores("train"), trainer.scores("heldout"))


def _families(samples: MeshSamples, group: str) -> list[str]:
    return sorted(set(samples.families[group]))


def _own_blocks(samples: MeshSamples, group: str, *names: str) -> Iterator[tuple[list[Values], str]]:
    """Yield blocks of the samples assigned to this rank (round-robin): values of the datasets, and the family."""
    file, comm = samples.file(group), samples.comm
    # Every sample is counted on one rank, and the histograms are summed over ranks.
    for sample in range(comm.rank, samples.count(group), comm.size):
        # In blocks of whole chunks, so that no chunk is read twice and a large sample need not fit into memory.
        for rows in chunk_aligned_boxes(file, f"{group}/label", sample, channels=False):
            values = []
            for name in names:
                box = (
                    rows
                    if name != "input"
                    else (rows[0], chunk_aligned_boxes(file, f"{group}/input", sample)[0][1], *rows[1:])
                )
                values.append(file.read(f"{group}/{name}", box)[0])
            yield values, samples.families[group][sample]


def _count_scores(
    samples: MeshSamples,
    group: str,
    score: Callable[[Values, Values], Values],
    *,
    low: float,
    high: float,
    bins: int,
) -> Histogram:
    """Count a score, which is a function of the label and the extrapolated Jacobian. Collective."""
    histogram = Histogram(low, high, _families(samples, group), bins)

    def count() -> None:
        for (label, jacobian), family in _own_blocks(samples, group, "label", "extrapolated"):
            histogram.add(score(label, jacobian), label, family)

    try_on_all_ranks(samples.comm, count, DataError)
    return histogram.sum_over(samples.comm)


def _count_channels(samples: MeshSamples, group: str, histograms: list[Histogram]) -> None:
    def count() -> None:
        for (label, channels), family in _own_blocks(samples, group, "label", "input"):
            for histogram, channel in zip(histograms, channels, strict=True):
                histogram.add(channel, label, family)

    try_on_all_ranks(samples.comm, count, DataError)
    for histogram in histograms:
        histogram.sum_over(samples.comm)
