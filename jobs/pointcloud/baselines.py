"""Baseline for networks on voxels: a perceptron on single points."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from distconv.errors import DataError

from .clouds import Clouds
from .sampling import draw_points
from .voxels import unit_cube

PERCEPTRON_POINTS = 512
"""Points of each cloud in the perceptron's input. More points do not improve its accuracy."""


class PointPerceptron(nn.Module):
    """Perceptron applied to every point, maximum over the points, and a perceptron on the maxima.

    Its output depends on which regions of space contain a point, not on the neighbors of a point.

    Source: C. R. Qi et al., "PointNet", CVPR 2017, without the networks that transform the input.

    Parameters
    ----------
    classes : int
        Number of classes.
    width : int
        Features of the first layer.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.lift = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in widths[1:])
        self.head = nn.Sequential(nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, classes))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return logits (N, classes) of clouds (N, P, 3)."""
        each = points.flatten(0, 1)
        for linear, norm in zip(self.lift, self.norms, strict=True):
            each = F.relu(norm(linear(each)))
        return self.head(each.view(*points.shape[:2], -1).amax(1))  # type: ignore[no-any-return]


def perceptron(train: Clouds, test: Clouds, *, epochs: int = 10, batch: int = 32, seed: int = 0) -> float:
    """Train a :class:`PointPerceptron` and return its test accuracy. Local: no communication.

    Parameters
    ----------
    train, test : Clouds
        The clouds.
    epochs : int
        Number of epochs.
    batch : int
        Largest mini-batch.
    seed : int
        Seed of weights, order and points.

    Returns
    -------
    float
        Fraction of the test clouds that are classified correctly.

    Raises
    ------
    DataError
        If there are no training clouds or no test clouds.
    """
    if not len(train.labels) or not len(test.labels):
        raise DataError(
            f"{len(train.labels)} training and {len(test.labels)} test clouds: at least one of each is required"
        )
    with torch.random.fork_rng(devices=()):  # the caller's random numbers continue as without the baseline
        torch.manual_seed(seed)
        model = PointPerceptron(len(train.class_names))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels))
        for samples in np.array_split(order, -(-len(order) // batch)):
            optimizer.zero_grad()
            points, labels = _stacked(train, samples, seed, epoch)
            F.cross_entropy(model(points), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = 0
        for samples in np.array_split(np.arange(len(test.labels)), -(-len(test.labels) // batch)):
            points, labels = _stacked(test, samples, seed, 0)
            right += int((model(points).argmax(1) == labels).sum())
    return right / len(test.labels)


def _stacked(clouds: Clouds, samples: NDArray[np.int64], seed: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points (N, P, 3), centered and scaled to size 1, and labels (N)."""
    volumes = []
    for sample in map(int, samples):
        points = clouds[sample].points
        taken = draw_points(len(points), PERCEPTRON_POINTS, seed=seed, epoch=epoch, sample=sample)
        volumes.append(unit_cube(torch.from_numpy(points[taken])) - 0.5)
    return torch.stack(volumes), torch.from_numpy(clouds.labels[samples])
