"""The bitstreams of the paper: each bit is set with a probability that tells the class.

Source: BPPSA, 4.1, Eq. 8: x_t ~ Bernoulli(0.05 + c * 0.1) for the classes c = 0, ..., 9.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
TRAIN, TEST = 0, 1
"""Groups, which never share a stream of random numbers."""


class Bitstreams:
    """``count`` labelled streams (T, 1) of ``length`` bits, made from their number when they are asked for.

    >>> streams = Bitstreams(20, 1000)
    >>> streams[12].shape, int(streams.labels[12]), bool(0.2 < streams[12].mean() < 0.3)
    ((1000, 1), 2, True)
    """

    def __init__(self, count: int, length: int, group: int = TRAIN) -> None:
        self.length, self.group = length, group
        self.labels: NDArray[np.int64] = np.arange(count) % CLASSES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """The bits of one stream as numbers, (T, 1)."""
        random = np.random.default_rng((self.group, index))
        return (random.random((self.length, 1)) < rate(int(self.labels[index]))).astype(np.float32)


def rate(label: int) -> float:
    """The probability of a bit to be set."""
    return 0.05 + 0.1 * label


def by_counting(streams: Bitstreams) -> float:
    """Accuracy of choosing the class whose rate is nearest to the share of bits that are set: about the best there is.

    >>> by_counting(Bitstreams(100, 2000, TEST))
    1.0
    """
    share = np.array([streams[index].mean() for index in range(len(streams.labels))])
    guess = np.clip(np.rint((share - 0.05) / 0.1), 0, CLASSES - 1)
    return float((guess == streams.labels).mean())
