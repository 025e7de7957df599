"""Training of a recurrent network to tell the classes of sequences: the networks, their settings, their accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distconv.errors import GridError
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.accumulation import accumulated
from distconv.jobs.training.classifier import Classifier
from distconv.layers.recurrent import ScanGRU, ScanRNN

from .samples import SequenceLoader, SequenceSamples

LAYERS: dict[str, type[ScanRNN | ScanGRU]] = {"rnn": ScanRNN, "gru": ScanGRU}
"""Recurrent layers by name."""


@dataclass(frozen=True)
class SequenceSettings(common.TrainingSettings):
    """What the numbers of a run on sequences depend on."""

    model: str = "gru"
    width: int | None = 20
    batch: int = 16
    epochs: int = 8
    optimizer: str = "adam"
    lr: float = 1e-2
    length: int = 200
    """Bits of a bitstream."""
    coefficients: int = 13
    """Coefficients of a sound, with the first, which is left out."""
    window_ms: float = 25.0
    """Time that a frame of a sound spans."""
    hop_ms: float = 10.0
    """Time between frames of a sound."""
    stereo: bool = False
    """Coefficients of each channel of a sound, not of the mean of its channels."""


class SequenceNetwork(nn.Module):
    """A recurrent layer, and a linear one on its state at the last step of each sequence.

    Source: BPPSA, 4.1 and 4.2.
    """

    def __init__(self, recurrent: ScanRNN | ScanGRU, classes: int) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(recurrent.hidden_size, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (N, classes) of sequences (N, T, C + 1), whose last channel marks their last steps."""
        states, _ = self.recurrent(x[..., :-1])
        return self.head((states * x[..., -1:]).sum(1))  # type: ignore[no-any-return]


class SequenceTrainer(Classifier, training.Trainer):
    """A recurrent classifier in training over a grid that splits samples (n) and time (w).

    ``method`` is how the network goes back through time: it is no setting, since it changes no number.

    Raises
    ------
    GridError
        If the grid has an axis that cuts nothing here.
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
            raise GridError(f"sequences are split in samples (n) and time (w); axis {useless[0]} cuts none of them")
        super().__init__(settings, _built(settings, samples, method), grid, samples.comm, device)
        self.samples = samples
        parts = SequenceLoader(samples, "train", grid, settings.part, seed=settings.seed, **settings.loading(device))
        self.loader = accumulated(parts, settings.accumulate)

    @property
    def notes(self) -> dict[str, Any]:
        """The task."""
        return {"task": "sequence"}

    def batches_of(self, group: str) -> SequenceLoader:
        """Batches of ``train`` or ``test`` in order."""
        return SequenceLoader(
            self.samples, group, self.grid, self.settings.batch, **self.settings.evaluating(self.device)
        )


def _built(settings: SequenceSettings, samples: SequenceSamples, method: str) -> SequenceNetwork:
    """The network with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    recurrent = LAYERS[settings.model](samples.channels, settings.width, batch_first=True, method=method)
    return SequenceNetwork(recurrent, len(samples.class_names))
