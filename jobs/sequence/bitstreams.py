"""Bitstreams of the BPPSA paper: the probability of a set bit depends on the class.

Source: BPPSA, 4.1, Eq. 8: x_t ~ Bernoulli(0.05 + c * 0.1) for the classes c = 0, ..., 9.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
TRAIN, TEST = 0, 1
"""Groups, which use independent streams of random numbers."""


class Bitstreams:
    """Labelled bitstreams (T, 1), generated from their index at each access.

    Parameters
    ----------
    count : int
        Number of bitstreams.
    length : int
        Number of bits of each, T.
    group : int
        ``TRAIN`` or ``TEST``.

    Examples
    --------
    >>> streams = Bitstreams(20, 1000)
    >>> streams[12].shape, int(streams.labels[12]), bool(0.2 < streams[12].mean() < 0.3)
    ((1000, 1), 2, True)
    """

    def __init__(self, count: int, length: int, group: int = TRAIN) -> None:
        self.length, self.group = length, group
        self.labels: NDArray[np.int64] = np.arange(count) % CLASSES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """Return the bits of one stream as float32 (T, 1)."""
        random = np.random.default_rng((self.group, index))
        return (random.random((self.length, 1)) < bit_probability(int(self.labels[index]))).astype(np.float32)


def bit_probability(label: int) -> float:
    """Return the probability of a set bit for a class."""
    return 0.05 + 0.1 * label


def counting_accuracy(streams: Bitstreams) -> float:
    """Return the accuracy of choosing the class whose probability is nearest to the fraction of set bits.

    It is about the best possible accuracy.

    Parameters
    ----------
    streams : Bitstreams
        The streams to classify.

    Returns
    -------
    float
        Fraction of the streams that are classified correctly.

    Examples
    --------
    >>> counting_accuracy(Bitstreams(100, 2000, TEST))
    1.0
    """
    share = np.array([streams[index].mean() for index in range(len(streams.labels))])
    guess = np.clip(np.rint((share - 0.05) / 0.1), 0, CLASSES - 1)
    return float((guess == streams.labels).mean())
