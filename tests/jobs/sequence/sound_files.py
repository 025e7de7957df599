"""Small files of labelled sounds: tones whose pitch tells the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io.wavfile

RATE = 8000


def tones(count: int = 12, classes: int = 3) -> tuple[list[Any], Any]:
    """Sounds int16 of several lengths, and their labels."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % classes
    sounds = []
    for label in labels:
        time = np.arange(random.integers(600, 1200)) / RATE
        wave = np.sin(2 * np.pi * 300 * (1 + label) * time * (1 + 0.5 * time)) + 0.1 * random.normal(size=time.shape)
        sounds.append((4000 * wave).astype(np.int16))
    return sounds, labels


def write_file(path: Path, *, held_out: str | None = "test", **replaced: Any) -> Path:
    """The tones as an HDF5 file; ``replaced`` datasets are others, or left out where they are None."""
    sounds, labels = tones()
    content: dict[str, Any] = {
        "audio": np.concatenate(sounds),
        "offset": np.cumsum([0, *map(len, sounds)]),
        "label": labels.astype(np.uint8),
    }
    if held_out is not None:
        content[held_out] = np.arange(len(labels)) >= 9 if held_out == "test" else np.arange(len(labels))[::-1] + 2
    with h5py.File(path, "w") as file:
        for name, values in (content | replaced).items():
            if values is not None:
                file[name] = values
        file.attrs["sample_rate"] = RATE
    return path


def write_folder(path: Path, *, test: bool = True, rates: tuple[int, ...] = (RATE,)) -> Path:
    """The same as a folder of WAV files."""
    for index, (sound, label) in enumerate(zip(*tones(), strict=True)):
        place = path / ("test" if test and index >= 9 else "train") / f"tone{label}"
        place.mkdir(parents=True, exist_ok=True)
        scipy.io.wavfile.write(place / f"{index}.wav", rates[index % len(rates)], sound)
    return path
