"""Training of recurrent networks that classify sequences: the networks, their settings, the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distconv.errors import GridError
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.accumulation import accumulate_batches
from distconv.jobs.training.classifier import Classifier
from distconv.layers.recurrent import ScanGRU, ScanRNN

from .samples import SequenceLoader, SequenceSamples

LAYERS: dict[str, type[ScanRNN | ScanGRU]] = {"rnn": ScanRNN, "gru": ScanGRU}
"""Recurrent layers by name."""


@dataclass(frozen=True)
class SequenceSettings(common.TrainingSettings):
    """Settings of a training on sequences."""

    model: str = "gru"
    width: int | None = 20
    batch: int = 16
    epochs: int = 8
    optimizer: str = "adam"
    lr: float = 1e-2
    length: int = 200
    """Number of bits of a bitstream."""
    coefficients: int = 13
    """Number of coefficients of a sound, including the first, which is left out."""
    window_ms: float = 25.0
    """Length of a frame of a sound, in ms."""
    hop_ms: float = 10.0
    """Time between two frames of a sound, in ms."""
    stereo: bool = False
    """If True, each channel of a sound has its own coefficients. Otherwise they are those of the channels' mean."""


class SequenceNetwork(nn.Module):
    """A recurrent layer, and a linear layer on its state at the last step of each sequence.

    Source: BPPSA, 4.1 and 4.2.

    Parameters
    ----------
    recurrent : ScanRNN or ScanGRU
        The recurrent layer, with the batch first.
    classes : int
        Number of classes.
    """

    def __init__(self, recurrent: ScanRNN | ScanGRU, classes: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(recurrent.hidden_size, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (N, classes) of sequences (N, T, C + 1), whose last channel marks their last steps."""
        states, _ = self.recurrent(x[..., :-1])
        # A product and a sum instead of an index, so that time may be split over ranks: one of them has the last step.
        return self.head((states * x[..., -1:]).sum(1))  # type: ignore[no-any-return]


class SequenceTrainer(Classifier, training.Trainer):
    """Training of a recurrent classifier over a grid that splits samples (n) and time (w).

    Collective: construct on every rank.

    Parameters
    ----------
    settings : SequenceSettings
        Settings of the training.
    samples : SequenceSamples
        The data set.
    grid : ProcessGrid
        The grid.
    device : str
        Device of the network.
    method : str
        Backward algorithm of the recurrent layer. It is not a setting, because it does not change results.

    Raises
    ------
    GridError
        If the grid splits another axis than n and w.
    """

    samples: SequenceSamples

    def __init__(
        self,
        settings: SequenceSettings,
        samples: SequenceSamples,
        grid: ProcessGrid,
        device: str = "cpu",
        *,
        method: str = "auto",
    ) -> None:
        useless = [axis for axis in grid.split_axes(grid.shape) if axis not in ("n", "w")]
        if useless:
            raise GridError(f"--grid: sequences have no axis {useless[0]}. Use samples (n) and time (w).")
        torch.manual_seed(settings.seed)  # the weights depend on the seed alone
        recurrent = LAYERS[settings.model](samples.channels, settings.width, batch_first=True, method=method)
        network = SequenceNetwork(recurrent, len(samples.class_names))
        super().__init__(settings, network, grid, samples.comm, device)
        self.samples = samples
        parts = SequenceLoader(
            samples, "train", grid, settings.part_size, seed=settings.seed, **settings.loader_options(device)
        )
        self.loader = accumulate_batches(parts, settings.accumulate)

    @property
    def notes(self) -> dict[str, Any]:
        """Task."""
        return {"task": "sequence"}

    def batches_of(self, group: str) -> SequenceLoader:
        """Return a loader of ``train`` or ``test`` in order."""
        return SequenceLoader(
            self.samples, group, self.grid, self.settings.batch, **self.settings.evaluation_options(self.device)
        )
