"""Coefficients of sounds against their definition."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import scipy.fft

import distconv as dc
from distconv.jobs.sequence.mfcc import CoefficientRecipe, mfcc

RATE = 8000


def by_hand(sound, coefficients=13, filters=23, window=200, hop=80, size=256, rate=RATE):
    """Kaldi's recipe: offset, pre-emphasis, Povey's window, power, triangles on the mel scale, logarithm, cosines."""
    count = (len(sound) + hop // 2) // hop
    begin = hop // 2 - window // 2
    places = begin + np.arange(count)[:, None] * hop + np.arange(window)
    mirrored = np.where(places < 0, -places - 1, np.where(places >= len(sound), 2 * len(sound) - 1 - places, places))
    frames = sound.astype(float)[mirrored]
    frames = frames - frames.mean(1, keepdims=True)
    frames = frames - 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    frames = frames * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / (window - 1))) ** 0.85
    power = np.abs(np.fft.rfft(frames, size)) ** 2
    mel = lambda f: 1127 * np.log(1 + f / 700)  # noqa: E731
    edges = np.linspace(mel(20), mel(rate / 2), filters + 2)
    at = mel(np.arange(size // 2) * rate / size)[None]
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.maximum(0, np.minimum((at - low) / (middle - low), (high - at) / (high - middle)))
    log = np.log(np.maximum(power[:, : size // 2] @ triangles.T, np.finfo(np.float32).eps))
    values = scipy.fft.dct(log, norm="ortho")[:, 1:coefficients]
    return (values - values.mean(0)) / values.std(0)


def test_coefficients_are_those_of_their_definition():
    random = np.random.default_rng(0)
    sound = (3000 * random.normal(size=2000).cumsum() / 20).astype(np.int16)
    found = mfcc(sound, RATE, CoefficientRecipe())
    assert found.shape == (25, 12) and found.dtype == np.float32
    np.testing.assert_allclose(found, by_hand(sound), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("coefficients", "window", "hop"), [(20, 4096, 512), (13, 2048, 256), (7, 1024, 128)])
def test_a_window_and_a_hop_of_so_many_samples_are_that_many(coefficients, window, hop):
    """BPPSA's S, M and L, at the rate of IRMAS."""
    rate = 44100
    sound = (3000 * np.random.default_rng(2).normal(size=rate // 2).cumsum() / 50).astype(np.int16)
    found = mfcc(sound, rate, CoefficientRecipe(coefficients, window / 44.1, hop / 44.1))
    assert np.array_equal(
        found, mfcc(sound, rate, CoefficientRecipe(coefficients, round(window / 44.1, 2), round(hop / 44.1, 4)))
    )
    np.testing.assert_allclose(found, by_hand(sound, coefficients, 23, window, hop, window, rate), rtol=0, atol=5e-3)


def test_channels_are_taken_together_or_apart():
    left, right = (1000 * np.random.default_rng(3).normal(size=(2, 1000))).astype(np.int16)
    both = np.stack([left, right], 1)
    assert np.array_equal(
        mfcc(both, RATE, CoefficientRecipe()), mfcc((left.astype(float) + right) / 2, RATE, CoefficientRecipe())
    )
    apart = mfcc(both, RATE, CoefficientRecipe(stereo=True))
    assert apart.shape == (13, CoefficientRecipe(stereo=True).values_per_frame(2)) == (13, 24)
    for index, channel in enumerate((left, right)):
        assert np.array_equal(apart[:, 12 * index : 12 * (index + 1)], mfcc(channel, RATE, CoefficientRecipe()))


@pytest.mark.parametrize("samples", [40, 100])
def test_silence_and_the_shortest_sounds_have_finite_coefficients(samples):
    found = mfcc(np.zeros(samples, np.int16), RATE, CoefficientRecipe())
    assert len(found) == 1 and np.isfinite(found).all()


def test_without_the_library_it_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(dc.DataError, match=r"kaldi-native-fbank is not installed.*pip install kaldi-native-fbank"):
        mfcc(np.zeros(100), RATE, CoefficientRecipe())
