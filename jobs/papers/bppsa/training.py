"""Figure 6: LeNet-5 trained on CIFAR-10 by scan and by autograd, from the same weights with the same batches.

Source: BPPSA, 3.5 and figure 6: batches of 256, SGD with rate 0.001 and momentum 0.9.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.papers.printed_tables import Rows
from distconv.layers.models.lenet import LeNet5
from distconv.layers.scan import ScanSequential

RATE, MOMENTUM = 0.001, 0.9
"""Learning rate and momentum of SGD (3.5)."""

DEPTH = 1
"""Levels of the up-sweep of the truncated scan. The paper does not state them for LeNet-5."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W), and labels (N)."""


def chain(model: LeNet5) -> list[nn.Module]:
    """Return the layers of LeNet-5 for 32 x 32 images in order, as ScanSequential requires.

    They share the parameters of ``model``, so its optimizer updates them.
    """
    maps = [layer for c in (model.c1, model.c3, model.c5) for layer in (c, nn.Tanh(), nn.AvgPool2d(2))]
    return [*maps, nn.Flatten(), model.f6, nn.Tanh(), model.output]


def table(path: Path, iterations: int, batch: int, rate: float = RATE) -> Rows:
    """Print the training losses by autograd and by scan at some iterations, and at the end the test losses.

    Parameters
    ----------
    path : pathlib.Path
        Data set.
    iterations : int
        Number of training iterations.
    batch : int
        Samples of a mini-batch.
    rate : float
        Learning rate.

    Returns
    -------
    list of dict
        A row for each iteration, and a last one whose ``iteration`` is ``"test"``.
    """
    print(f"\nFigure 6, LeNet-5 on {path}, batches of {batch}, SGD {rate:g}, momentum {MOMENTUM}, float32", flush=True)
    samples = ImageSamples(path, MPI.COMM_SELF)
    curves, seconds = {}, {}
    for scan in (False, True):
        curves[scan], seconds[scan] = train(samples, iterations, batch, rate, scan=scan)
    samples.close()
    print(f"{'iteration':>9}{'autograd':>12}{'scan':>12}{'difference':>12}")
    rows: Rows = []
    last = len(curves[True]) - 1
    for number, (plain, scanned) in enumerate(zip(curves[False], curves[True], strict=True), 1):
        rows.append({"iteration": "test" if number > last else number, "autograd": plain, "scan": scanned})
        if number % max(1, last // 10) == 0 or number > last or number == 1:
            print(f"{rows[-1]['iteration']:>9}{plain:>12.6f}{scanned:>12.6f}{scanned - plain:>12.1e}")
    print(f"largest difference {max(abs(a - b) for a, b in zip(*curves.values(), strict=True)):.1e}; ", end="")
    print(f"forward and backward took {seconds[True] / seconds[False]:.1f} times as long by scan")
    return rows


def train(samples: ImageSamples, iterations: int, batch: int, rate: float, *, scan: bool) -> tuple[list[float], float]:
    """Train, and measure the time of the forward and backward passes.

    Parameters
    ----------
    samples : ImageSamples
    iterations : int
        Number of training iterations.
    batch : int
        Samples of a mini-batch.
    rate : float
        Learning rate.
    scan : bool
        True uses the scan for the backward passes. Otherwise autograd computes them.

    Returns
    -------
    (list of float, float)
        Training losses, followed by the loss of a batch of test images (or training images without them), and
        the seconds of the forward and backward passes.
    """
    # Before the model is built: both ways begin with the same weights.
    torch.manual_seed(0)
    model = LeNet5(in_channels=samples.extents[0], classes=samples.classes)
    run: nn.Module = ScanSequential(*chain(model), method="truncated", depth=DEPTH) if scan else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    losses, seconds = [], 0.0
    for images, labels in islice(batches(samples, "train", batch), iterations):
        optimizer.zero_grad()
        start = time.perf_counter()
        loss = F.cross_entropy(run(images), labels)
        loss.backward()
        seconds += time.perf_counter() - start
        optimizer.step()
        losses.append(loss.item())
    images, labels = next(batches(samples, "test" if "test" in samples.groups else "train", batch))
    with torch.no_grad():
        losses.append(F.cross_entropy(run(images), labels).item())
    return losses, seconds


def batches(samples: ImageSamples, group: str, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Yield images and labels of a group endlessly, in an order that depends on the seed only.

    Parameters
    ----------
    samples : ImageSamples
    group : str
        ``train`` or ``test``.
    batch : int
        Samples of a mini-batch.
    seed : int
        Seed.

    Yields
    ------
    Batch

    Raises
    ------
    DataError
        If the group has fewer images than a batch.
    """
    available = len(samples.groups[group].labels)
    if available < batch:
        raise DataError(
            f"--batch {batch}: the group {group!r} has only {available} images. Use a batch of at most {available}."
        )
    loader = samples.loader(group, ProcessGrid(samples.comm), batch, seed=seed, shuffle=True, drop_last=True)
    for epoch in count():
        for loaded in loader.epoch(epoch):
            images, labels = loaded.tensors
            yield images.local, labels.local
