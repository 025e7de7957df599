"""Mel-frequency cepstral coefficients of sounds, by kaldi-native-fbank. The only module that imports it.

Of the libraries with wheels it is a small one that needs no other (half a megabyte; librosa brings twenty packages),
and its coefficients are those of Kaldi. Without dither, so that a sound has the same ones every time.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distconv.errors import DataError


@dataclass(frozen=True)
class Recipe:
    """How coefficients are made."""

    coefficients: int = 13
    window_ms: float = 25.0
    hop_ms: float = 10.0

    @property
    def channels(self) -> int:
        """Values of a frame: all coefficients but the first."""
        return self.coefficients - 1


def library() -> Any:
    """kaldi-native-fbank.

    Raises
    ------
    DataError
        If it is not installed.
    """
    try:
        return importlib.import_module("kaldi_native_fbank")
    except ImportError as missing:
        raise DataError(
            "coefficients of sounds need kaldi-native-fbank, which is not installed here: "
            "pip install kaldi-native-fbank"
        ) from missing


def mfcc(sound: NDArray[Any], rate: float, recipe: Recipe) -> NDArray[np.float32]:
    """Coefficients (frames, channels) of ``sound``, samples at ``rate`` Hz; each with mean 0 and variance 1 over time.

    The first coefficient, which is the power, is left out. Source: BPPSA, 4.2.

    Raises
    ------
    DataError
        If kaldi-native-fbank is not installed.
    """
    knf = library()
    options = knf.MfccOptions()
    options.frame_opts.samp_freq, options.frame_opts.dither = rate, 0.0
    options.frame_opts.frame_length_ms, options.frame_opts.frame_shift_ms = recipe.window_ms, recipe.hop_ms
    options.frame_opts.snip_edges = False  # the last frames reach beyond the end; a short sound has frames, too
    options.num_ceps, options.mel_opts.num_bins = recipe.coefficients, max(23, recipe.coefficients)
    extractor = knf.OnlineMfcc(options)
    extractor.accept_waveform(rate, sound.astype(np.float32).tolist())
    extractor.input_finished()
    frames = [extractor.get_frame(index)[1:] for index in range(extractor.num_frames_ready)]
    values = np.array(frames, np.float32).reshape(-1, recipe.channels)
    return np.asarray((values - values.mean(0)) / np.maximum(values.std(0), 1e-6), np.float32)
