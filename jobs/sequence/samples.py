"""Sequences to train and to test on, and their mini-batches over a grid that splits samples (n) and time (w).

Sequences of a batch are padded to the longest. What comes behind the end of one has no effect on its states before, so
a network answers by the state at its last step, which a channel of its own marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.loader import Batch, EpochLoader
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.placement import scatter

from .audio import Sounds, recordings
from .bitstreams import CLASSES, TEST, TRAIN, Bitstreams
from .mfcc import CoefficientRecipe

STREAMS = {"train": (2000, TRAIN), "test": (500, TEST)}
"""Embedded bitstreams of each group."""


class Sequences(Protocol):
    """Labelled sequences."""

    labels: NDArray[np.int64]

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """One of them, (T, C)."""


class SequenceSamples:
    """The sounds of a file or a folder, or without a ``path`` bitstreams of ``length`` bits. Collective.

    Raises
    ------
    DataError
        On all ranks, if files are missing or not what they should be.
    """

    def __init__(self, path: Path | None, comm: MPI.Intracomm, *, length: int, recipe: CoefficientRecipe) -> None:
        self.comm = comm
        self.groups: Mapping[str, Sequences]
        if path is None:
            self.name, self.class_names, self.channels = "bitstreams", tuple(map(str, range(CLASSES))), 1
            self.groups = {group: Bitstreams(count, length, stream) for group, (count, stream) in STREAMS.items()}
            return
        loaded = try_on_all_ranks(comm, lambda: recordings(path), DataError)
        check_same_on_all_ranks(
            comm, str(path), ", ".join(f"{len(clips.labels)} of {group}" for group, clips in loaded.groups.items())
        )
        self.name, self.class_names, self.channels = str(path), loaded.class_names, recipe.values(loaded.channels)
        self.groups = {group: Sounds(clips, loaded.rate, recipe, comm) for group, clips in loaded.groups.items()}

    def place(self, group: str) -> object:
        """The file or folder."""
        return self.name

    def close(self) -> None:
        """Nothing is open: all sequences are in memory."""


class SequenceLoader(EpochLoader):
    """Batches of ``batch`` sequences: (N, T, C + 1) over axes n and w of ``grid``, and labels (N) over n.

    The last channel is 1 at the last step of a sequence and 0 elsewhere. ``order`` is that of Epochs.
    """

    def __init__(
        self,
        samples: SequenceSamples,
        group: str,
        grid: ProcessGrid,
        batch: int,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        **order: Any,
    ) -> None:
        self._sequences, self.grid, self.dtype, self.device = samples.groups[group], grid, dtype, device
        super().__init__(len(self._sequences.labels), batch, (samples.name, f"sequences of {group!r}"), **order)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on. Collective, as is each batch."""
        for samples in self.batches(number, start):
            inputs, labels = padded([self._sequences[i] for i in samples]), self._sequences.labels[list(samples)]
            place = partial(scatter, target=self.grid)
            x = place(torch.from_numpy(inputs).to(self.device, self.dtype), dims="nw-")
            yield Batch(samples, (x, place(torch.from_numpy(labels).to(self.device), dims="n")))


def padded(sequences: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Sequences (T, C) as one array (N, longest T, C + 1), whose last channel marks each one's last step.

    >>> padded([np.full((1, 1), 5.0), np.full((2, 1), 6.0)]).tolist()
    [[[5.0, 1.0], [0.0, 0.0]], [[6.0, 0.0], [6.0, 1.0]]]
    """
    result = np.zeros((len(sequences), max(map(len, sequences)), sequences[0].shape[1] + 1), np.float32)
    for row, sequence in zip(result, sequences, strict=True):
        row[: len(sequence), :-1] = sequence
        row[len(sequence) - 1, -1] = 1
    return result
