"""Training and test sequences, and their mini-batches over a grid that splits samples (n) and time (w).

Sequences of a mini-batch are padded to the longest. An additional channel marks the last step of each sequence, at
which the network's state is the result. Padding has no effect on the states before it.
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

from .audio import Sounds, read_recordings
from .bitstreams import CLASSES, TEST, TRAIN, Bitstreams
from .mfcc import CoefficientRecipe

STREAMS = {"train": (2000, TRAIN), "test": (500, TEST)}
"""Number of embedded bitstreams and random stream of each group."""


class Sequences(Protocol):
    """Interface of a set of labelled sequences."""

    labels: NDArray[np.int64]

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """Return one sequence (T, C)."""


class SequenceSamples:
    """Sounds of a file or a folder, or embedded bitstreams. Collective: construct on every rank.

    Parameters
    ----------
    path : Path, optional
        HDF5 file, or folder of WAV files; None for bitstreams.
    comm : MPI.Intracomm
        The ranks that read the sounds.
    length : int
        Number of bits of a bitstream.
    recipe : CoefficientRecipe
        Settings of the coefficients of sounds.

    Raises
    ------
    DataError
        On all ranks, if files are missing or invalid.
    MismatchError
        If ranks read different numbers of sounds.
    """

    def __init__(self, path: Path | None, comm: MPI.Intracomm, *, length: int, recipe: CoefficientRecipe) -> None:
        self.comm = comm
        self.groups: Mapping[str, Sequences]
        if path is None:
            self.name, self.class_names, self.channels = "bitstreams", tuple(map(str, range(CLASSES))), 1
            self.groups = {group: Bitstreams(count, length, stream) for group, (count, stream) in STREAMS.items()}
            return
        loaded = try_on_all_ranks(comm, lambda: read_recordings(path), DataError)
        check_same_on_all_ranks(
            comm, str(path), ", ".join(f"{len(clips.labels)} of {group}" for group, clips in loaded.groups.items())
        )
        self.name, self.class_names, self.channels = (
            str(path),
            loaded.class_names,
            recipe.values_per_frame(loaded.channels),
        )
        self.groups = {group: Sounds(clips, loaded.rate, recipe, comm) for group, clips in loaded.groups.items()}

    def source_path(self, group: str) -> object:
        """Return the file or folder."""
        return self.name

    def close(self) -> None:
        """Do nothing: all sequences are in memory."""


class SequenceLoader(EpochLoader):
    """Loader of sequences (N, T, C + 1) over axes n and w of a grid, and labels (N) over n.

    The last channel is 1 at the last step of a sequence and 0 elsewhere.

    Parameters
    ----------
    samples : SequenceSamples
        The data set.
    group : str
        ``train`` or ``test``.
    grid : ProcessGrid
        The grid over which batches are distributed.
    batch : int
        Sequences in a global mini-batch.
    dtype : torch.dtype
        Data type of the sequences. Labels are int64.
    device : str
        Device of the tensors.
    **order
        Options of :class:`distconv.data.loader.EpochLoader`, such as ``seed`` and ``shuffle``.
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
        """Yield the batches of an epoch from step ``start`` on. Collective: iterate on every rank.

        Parameters
        ----------
        number : int
            Epoch.
        start : int
            First step of the epoch to yield.

        Yields
        ------
        Batch
        """
        for samples in self.batches(number, start):
            inputs, labels = pad_sequences([self._sequences[i] for i in samples]), self._sequences.labels[list(samples)]
            place = partial(scatter, target=self.grid)
            x = place(torch.from_numpy(inputs).to(self.device, self.dtype), dims="nw-")
            yield Batch(samples, (x, place(torch.from_numpy(labels).to(self.device), dims="n")))


def pad_sequences(sequences: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return sequences (T, C) as one array, padded with zeros to the longest.

    Parameters
    ----------
    sequences : list of ndarray
        Sequences (T, C).

    Returns
    -------
    ndarray of float32
        Array (N, longest T, C + 1). Its last channel is 1 at the last step of each sequence and 0 elsewhere.

    Examples
    --------
    >>> pad_sequences([np.full((1, 1), 5.0), np.full((2, 1), 6.0)]).tolist()
    [[[5.0, 1.0], [0.0, 0.0]], [[6.0, 0.0], [6.0, 1.0]]]
    """
    result = np.zeros((len(sequences), max(map(len, sequences)), sequences[0].shape[1] + 1), np.float32)
    for row, sequence in zip(result, sequences, strict=True):
        row[: len(sequence), :-1] = sequence
        row[len(sequence) - 1, -1] = 1
    return result
