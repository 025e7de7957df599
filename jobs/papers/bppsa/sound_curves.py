"""Figure 13: loss by seconds of a GRU on sounds in the settings S, M and L, trained by scan and by autograd.

Both begin with the same weights and see the same batches. On 8 kHz a window has as many milliseconds as at the 44.1 kHz
of IRMAS, not as many samples.

Source: BPPSA, 4.2, table 3 and appendix F: 400 epochs of batches of 16, Adam with rate 0.0003.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.grid import ProcessGrid
from distconv.jobs.papers.printed_tables import Rows
from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.samples import SequenceLoader, SequenceSamples
from distconv.jobs.sequence.trainer import SequenceNetwork
from distconv.layers.recurrent import ScanGRU

from .epochs import HIDDEN, RATES

BATCH = 16
# Two channels of a sound have their own coefficients, without the first: (20 - 1) x 2 = 38 values in S, as in Table 3.
SETS = {
    name: CoefficientRecipe(coefficients, window / 44.1, hop / 44.1, stereo=True)
    for name, coefficients, window, hop in (("S", 20, 4096, 512), ("M", 13, 2048, 256), ("L", 7, 1024, 128))
}
"""Settings of Table 3, by name."""

METHODS = {"BP": "autograd", "BPPSA": "blelloch", "auto": "auto"}
"""Backward algorithm of the recurrent layer, by the name of the column."""

Curve = list[tuple[float, float]]
"""Seconds of training so far, and the mean loss of the epoch that ends there."""


def table(path: Path, epochs: int) -> Rows:
    """Print a row for each epoch of each setting: the loss of every method, and its seconds so far.

    Parameters
    ----------
    path : pathlib.Path
        Sounds.
    epochs : int
        Number of epochs.

    Returns
    -------
    list of dict
    """
    rows: Rows = []
    for name, recipe in SETS.items():
        # ``length`` has no effect: it is for generated bitstreams.
        samples = SequenceSamples(path, MPI.COMM_SELF, length=1, recipe=recipe)
        frames = max(len(samples.groups["train"][i]) for i in range(len(samples.groups["train"].labels)))
        print(
            f"\nFigure 13, {name}: {path.name}, up to {frames} x {samples.channels} values, batches of {BATCH}, float32"
        )
        print(f"{'epoch':>5}" + "".join(f"{f'{method} loss':>14}{'s':>8}" for method in METHODS))
        curves = {name: curve(samples, method, epochs) for name, method in METHODS.items()}
        for epoch, points in enumerate(zip(*curves.values(), strict=True), 1):
            print(f"{epoch:>5}" + "".join(f"{loss:>14.6f}{seconds:>8.1f}" for seconds, loss in points))
        rows.append({"set": name, "frames": frames, "values": samples.channels, "curves": curves})
    return rows


def curve(samples: SequenceSamples, method: str, epochs: int) -> Curve:
    """Train with one method. The time of loading batches counts, that of computing coefficients does not.

    Parameters
    ----------
    samples : SequenceSamples
    method : str
        Backward algorithm.
    epochs : int
        Number of epochs.

    Returns
    -------
    Curve
    """
    torch.manual_seed(0)
    model = SequenceNetwork(
        ScanGRU(samples.channels, HIDDEN, batch_first=True, method=method), len(samples.class_names)
    )
    optimizer = torch.optim.Adam(model.parameters(), RATES["gru"])
    loader = SequenceLoader(samples, "train", ProcessGrid(samples.comm), BATCH, dtype=torch.float32, shuffle=True)
    points: Curve = []
    begin = time.perf_counter()
    for epoch in range(epochs):
        losses = []
        for batch in loader.epoch(epoch):
            x, labels = (tensor.local for tensor in batch.tensors)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        points.append((time.perf_counter() - begin, sum(losses) / len(losses)))
    return points
