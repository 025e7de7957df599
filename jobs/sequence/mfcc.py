"""Mel-frequency cepstral coefficients of sounds, by kaldi-native-fbank. The only module that imports it.

The library is small (half a megabyte) and has no dependencies, and its coefficients are those of Kaldi. Dither is
switched off, so that the coefficients of a sound are reproducible.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError


@dataclass(frozen=True)
class CoefficientRecipe:
    """Settings of the coefficients.

    Parameters
    ----------
    coefficients : int
        Number of coefficients, including the first, which is left out.
    window_ms, hop_ms : float
        Length of a frame, and time between two frames, in ms.
    stereo : bool
        If True, each channel of a sound has its own coefficients. Otherwise they are those of the channels' mean.
    """

    coefficients: int = 13
    window_ms: float = 25.0
    hop_ms: float = 10.0
    stereo: bool = False

    def values_per_frame(self, channels: int) -> int:
        """Return the number of values in a frame of a sound with ``channels`` channels."""
        return (channels if self.stereo else 1) * (self.coefficients - 1)


def import_fbank() -> Any:
    """Import kaldi-native-fbank.

    Raises
    ------
    DataError
        If it is not installed.
    """
    try:
        return importlib.import_module("kaldi_native_fbank")
    except ImportError as missing:
        raise DataError("sounds: kaldi-native-fbank is not installed. Run pip install kaldi-native-fbank.") from missing


def mfcc(sound: NDArray[Any], rate: float, recipe: CoefficientRecipe) -> NDArray[np.float32]:
    """Return the coefficients of a sound, each normalized to mean 0 and variance 1 over time.

    The first coefficient, the power, is left out. Those of the second channel follow those of the first.

    Source: BPPSA, 4.2.

    Parameters
    ----------
    sound : ndarray
        Samples (samples) or (samples, channels).
    rate : float
        Sample rate in Hz.
    recipe : CoefficientRecipe
        Settings of the coefficients.

    Returns
    -------
    ndarray of float32
        Coefficients (frames, values).

    Raises
    ------
    DataError
        If kaldi-native-fbank is not installed.
    """
    by_channel = np.atleast_2d(sound.T)
    rows = by_channel if recipe.stereo else by_channel.mean(0, keepdims=True)
    return np.concatenate([_of_channel(row, rate, recipe) for row in rows], 1)


def _of_channel(sound: NDArray[Any], rate: float, recipe: CoefficientRecipe) -> NDArray[np.float32]:
    knf = import_fbank()
    options = knf.MfccOptions()
    options.frame_opts.samp_freq, options.frame_opts.dither = rate, 0.0
    options.frame_opts.frame_length_ms, options.frame_opts.frame_shift_ms = recipe.window_ms, recipe.hop_ms
    options.frame_opts.snip_edges = False  # the last frames reach beyond the end; a short sound has frames, too
    # Kaldi's 23 mel bins; there cannot be more coefficients than bins.
    options.num_ceps, options.mel_opts.num_bins = recipe.coefficients, max(23, recipe.coefficients)
    extractor = knf.OnlineMfcc(options)
    extractor.accept_waveform(rate, sound.astype(np.float32).tolist())
    extractor.input_finished()
    frames = [extractor.get_frame(index)[1:] for index in range(extractor.num_frames_ready)]
    values = np.array(frames, np.float32).reshape(-1, recipe.coefficients - 1)
    return np.asarray((values - values.mean(0)) / np.maximum(values.std(0), 1e-6), np.float32)
