"""Gradient accumulation (``--accumulate``): mini-batches as groups of smaller batches.

The trainers of the jobs call it when they create their loader. The samples of a mini-batch do not depend on the grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice

from distconv.data.loader import Batch, EpochLoader


class AccumulatedLoader(EpochLoader):
    """Mini-batches of ``count`` consecutive batches of ``parts``.

    Each tensor of a mini-batch is a tuple with one tensor per part. The last mini-batch of an epoch may have fewer
    parts. It is dropped if ``parts`` drops its last batch.

    Parameters
    ----------
    parts : EpochLoader
        Loader of the parts.
    count : int
        Parts per mini-batch.
    """

    def __init__(self, parts: EpochLoader, count: int) -> None:
        more = {"seed": parts.seed, "shuffle": parts.shuffle, "drop_last": parts.drop_last}
        super().__init__(parts.samples, parts.batch * count, ("--accumulate", "samples"), **more)  # type: ignore[arg-type]
        self.parts, self.count = parts, count

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the mini-batches of an epoch from step ``start`` on. Collective: advance it on every rank.

        Parameters
        ----------
        number : int
            Epoch.
        start : int
            First step of the epoch to yield, in mini-batches.

        Yields
        ------
        Batch
            Sample indices of all parts, and for each field a tuple of the parts' tensors.
        """
        # Closed also if the caller stops within an epoch: the loader of the parts may still be reading ahead.
        with closing(self.parts.epoch(number, start * self.count)) as parts:  # type: ignore[type-var]  # a generator
            for _ in range(start, self.steps):
                group = list(islice(parts, self.count))
                samples = tuple(chain.from_iterable(part.samples for part in group))
                yield Batch(samples, tuple(zip(*(part.tensors for part in group), strict=True)))


def accumulate_batches(parts: EpochLoader, count: int) -> EpochLoader:
    """Return a loader of mini-batches of ``count`` parts each, or ``parts`` itself if ``count`` is 1.

    Parameters
    ----------
    parts : EpochLoader
        Loader of the parts.
    count : int
        Parts per mini-batch.

    Returns
    -------
    EpochLoader
        Loader of the mini-batches.

    Raises
    ------
    DataError
        If the samples are too few for one mini-batch.
    """
    return parts if count == 1 else AccumulatedLoader(parts, count)
