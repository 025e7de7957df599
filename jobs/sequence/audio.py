"""Labelled sounds of an HDF5 file, or of a folder of WAV files.

A file has all clips in one dataset::

    audio   (samples)          clip i is audio[offset[i]:offset[i + 1]]
    offset  (N + 1) integers
    label   (N) integers
    test    (N)                nonzero for test clips; or
    take    (N)                below 5 for test clips (free spoken digits)

Without ``test`` and ``take``, all clips are training clips. The attribute ``sample_rate`` is in Hz. A folder has
``train/CLASS/*.wav`` and optionally ``test/CLASS/*.wav``, all with the same sample rate and number of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io.wavfile
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.opened_file import open_hdf5, read_dataset, resolve_internal_link
from distconv.errors import DataError
from distconv.whole_files import open_regular

from .mfcc import CoefficientRecipe, mfcc

HELD_OUT_TAKES = 5
"""Value of ``take`` from which on a clip is a training clip."""
MOST_CLASSES = 10**5
"""Upper bound of the number of classes. A larger label is an error in the file."""

_KINDS = {"iu": "whole numbers", "iuf": "numbers", "iufb": "numbers"}


@dataclass(frozen=True, eq=False)
class Clips:
    """Sounds (samples) or (samples, channels) with their labels."""

    sounds: list[NDArray[Any]]
    labels: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Recordings:
    """Clips of ``train`` and, if there are any, ``test``; ``rate`` in Hz."""

    groups: dict[str, Clips]
    class_names: tuple[str, ...]
    rate: float
    channels: int = 1
    """Number of channels of every sound."""


def read_recordings(path: Path) -> Recordings:
    """Read the sounds of a file or a folder. Local.

    Parameters
    ----------
    path : Path
        HDF5 file, or folder of WAV files.

    Returns
    -------
    Recordings
        The sounds.

    Raises
    ------
    DataError
        If the path is neither, a file is invalid, a sound is empty, or there are no training sounds.
    """
    loaded = _of_folder(path) if path.is_dir() else _of_file(path)
    if not len(loaded.groups.get("train", Clips([], np.zeros(0, np.int64))).labels):
        raise DataError(
            f"{path}: no training sounds found. Add clips that are not held out, or files train/CLASS/*.wav."
        )
    for group, clips in loaded.groups.items():
        for index, sound in enumerate(clips.sounds):
            if not len(sound):
                raise DataError(f"{path}: sound {index} of {group!r} is empty. Leave it out.")
    return loaded


def _of_file(path: Path) -> Recordings:
    try:
        file, state = open_hdf5(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read as HDF5: {error}") from error
    with file:

        def numbers(name: str, kinds: str) -> NDArray[Any]:
            row = read_dataset(file, name, path, state.size)
            if row.ndim != 1 or row.dtype.kind not in kinds:
                raise DataError(
                    f"{path}: dataset {name!r} is {row.dtype} {row.shape}, but must be one-dimensional, of "
                    f"{_KINDS[kinds]}"
                )
            return row

        missing = [name for name in ("audio", "offset", "label") if resolve_internal_link(file, name) is None]
        if missing or "sample_rate" not in file.attrs:
            raise DataError(
                f"{path}: no {', '.join(missing) or 'attribute sample_rate'}. Store sounds as the datasets audio, "
                "offset and label with the attribute sample_rate."
            )
        audio, offset, label = numbers("audio", "iuf"), numbers("offset", "iu"), numbers("label", "iu")
        held_out = np.zeros(len(label), bool)
        if resolve_internal_link(file, "test") is not None:
            held_out = numbers("test", "iufb").astype(bool)
        elif resolve_internal_link(file, "take") is not None:
            held_out = numbers("take", "iuf") < HELD_OUT_TAKES
        rate = _rate(file.attrs["sample_rate"], path)
    if len(held_out) != len(label):
        raise DataError(
            f"{path}: heldout has {len(held_out)} values, but there are {len(label)} labels. Write one value "
            "for each clip."
        )
    offset = offset.astype(np.int64)
    if len(offset) != len(label) + 1 or offset[0] < 0 or offset[-1] > len(audio) or (np.diff(offset) < 0).any():
        raise DataError(
            f"{path}: offset has {len(offset)} values up to {offset[-1] if len(offset) else 0} for "
            f"{len(label)} labels and {len(audio)} samples, but must rise from the start of the first clip to "
            "the end of the last one"
        )
    label = label.astype(np.int64)
    if len(label) and not 0 <= label.min() <= label.max() < MOST_CLASSES:
        raise DataError(f"{path}: labels are {label.min()} to {label.max()}, but classes are counted from 0")
    groups = {}
    for group, chosen in (("train", ~held_out), ("test", held_out)):
        places = np.flatnonzero(chosen)
        if len(places):
            sounds = [audio[offset[i] : offset[i + 1]] for i in places]
            groups[group] = Clips(sounds, label[places])
    return Recordings(groups, tuple(map(str, range(int(label.max(initial=0)) + 1))), rate)


def _rate(given: object, path: Path) -> float:
    try:
        rate = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < np.inf:
        raise DataError(f"{path}: the attribute sample_rate is {given!r}, but must be a positive number of Hz")
    return rate


def _of_folder(path: Path) -> Recordings:
    names = tuple(sorted({place.name for place in path.glob("t*/*") if place.is_dir()}))
    kinds: dict[tuple[float, int], Path] = {}
    groups = {}
    for group in ("train", "test"):
        files = sorted((path / group).glob("*/*.wav"))
        sounds = []
        for file in files:
            try:
                with open_regular(file) as stream:
                    rate, sound = scipy.io.wavfile.read(stream)
            except (OSError, ValueError) as error:
                raise DataError(f"{file}: cannot be read as WAV: {error}") from error
            kinds.setdefault((float(rate), 1 if sound.ndim == 1 else sound.shape[1]), file)
            sounds.append(sound)
        if files:
            groups[group] = Clips(sounds, np.array([names.index(file.parent.name) for file in files]))
    if len(kinds) > 1:
        listed = ", ".join(f"{file} {rate:g} Hz, {channels} channel(s)" for (rate, channels), file in kinds.items())
        raise DataError(
            f"{path}: sounds have different sample rates or numbers of channels ({listed}). Convert them to one."
        )
    rate, channels = next(iter(kinds), (0.0, 1))
    return Recordings(groups, names, rate, channels)


class Sounds:
    """Mel-frequency cepstral coefficients (frames, values) of the clips of a group.

    Collective: construct on every rank. Each rank computes the coefficients of some clips; then every rank holds all.

    Parameters
    ----------
    clips : Clips
        The clips.
    rate : float
        Sample rate in Hz.
    recipe : CoefficientRecipe
        Settings of the coefficients.
    comm : MPI.Intracomm
        The ranks.

    Raises
    ------
    DataError
        On all ranks, if the coefficients of a clip cannot be computed.
    """

    def __init__(self, clips: Clips, rate: float, recipe: CoefficientRecipe, comm: MPI.Intracomm) -> None:
        self.labels = clips.labels
        own = range(comm.rank, len(clips.sounds), comm.size)
        features = try_on_all_ranks(comm, lambda: [mfcc(clips.sounds[index], rate, recipe) for index in own], DataError)
        shares = comm.allgather(features)
        # Clip i was computed by rank i modulo their number, as in ``own``.
        self._values: list[NDArray[np.float32]] = [
            shares[index % comm.size][index // comm.size] for index in range(len(clips.sounds))
        ]

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """Return the coefficients (frames, values) of one clip."""
        return self._values[index]
