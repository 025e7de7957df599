"""Training of a recurrent network to tell the classes of sequences: the networks, their settings, their accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from distconv.data.loader import Batch
from distconv.errors import GridError
from distconv.grid import ProcessGrid
from distconv.jobs.training import training
from distconv.jobs.training.score import Score, score
from distconv.layers.recurrent import ScanGRU, ScanRNN
from distconv.placement import gather

from .samples import SequenceLoader, SequenceSamples

LAYERS: dict[str, type[ScanRNN | ScanGRU]] = {"rnn": ScanRNN, "gru": ScanGRU}
"""Recurrent layers by name."""


@dataclass(frozen=True)
class Settings(training.Settings):
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
    hop_ms: float = 10.0
    """Time between frames of a sound."""


class Classifier(nn.Module):
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


class Trainer(training.Trainer):
    """A recurrent classifier in training over a grid that splits samples (n) and time (w).

    ``method`` is how the network goes back through time: it is no setting, since it changes no number.

    Raises
    ------
    GridError
        If the grid has an axis that cuts nothing here.
    """

    loader: SequenceLoader

    def __init__(
        self,
        settings: Settings,
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
        self.loader = self._loader("train", shuffle=True, drop_last=settings.drop_last)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of logits (N, classes)."""
        return F.cross_entropy(outputs, labels)

    @torch.no_grad()
    def predictions(self, group: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Batches of ``train`` or ``test`` in order, with all their logits (N, classes) on every rank. Collective."""
        self.model.eval()
        for batch in self._loader(group).epoch(0):
            yield batch, gather(self.model(batch.tensors[0])).cpu()

    def evaluate(self, group: str) -> Score:
        """Loss and accuracy on the sequences of ``train`` or ``test``. Collective."""
        labels = torch.from_numpy(self.samples.groups[group].labels)
        return score(
            self.samples.name,
            group,
            ((batch.samples, labels[list(batch.samples)], logits) for batch, logits in self.predictions(group)),
        )

    def _loader(self, group: str, *, shuffle: bool = False, drop_last: bool = False) -> SequenceLoader:
        return SequenceLoader(
            self.samples,
            group,
            self.grid,
            self.settings.batch,
            dtype=self.dtype,
            device=self.device,
            seed=self.settings.seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )


def _built(settings: Settings, samples: SequenceSamples, method: str) -> Classifier:
    """The network with weights that follow from the seed alone."""
    torch.manual_seed(settings.seed)
    recurrent = LAYERS[settings.model](samples.channels, settings.width, batch_first=True, method=method)
    return Classifier(recurrent, len(samples.class_names))
