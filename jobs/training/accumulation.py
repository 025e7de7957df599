"""Mini-batches in parts whose gradients add up: what they are does not depend on the grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice

from distconv.data.loader import Batch, EpochLoader


class Accumulated(EpochLoader):
    """Mini-batches of ``count`` batches of ``parts`` each, whose tensors are tuples of theirs.

    The last of an epoch may have fewer parts, or is dropped if those of ``parts`` are.
    """

    def __init__(self, parts: EpochLoader, count: int) -> None:
        more = {"seed": parts.seed, "shuffle": parts.shuffle, "drop_last": parts.drop_last}
        super().__init__(parts.samples, parts.batch * count, ("--accumulate", "samples"), **more)  # type: ignore[arg-type]
        self.parts, self.count = parts, count

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The mini-batches of an epoch from step ``start`` on. Collective, as is each."""
        with closing(self.parts.epoch(number, start * self.count)) as parts:  # type: ignore[type-var]  # a generator
            for _ in range(start, self.steps):
                group = list(islice(parts, self.count))
                samples = tuple(chain.from_iterable(part.samples for part in group))
                yield Batch(samples, tuple(zip(*(part.tensors for part in group), strict=True)))


def accumulated(parts: EpochLoader, count: int) -> EpochLoader:
    """The mini-batches of ``count`` parts each; of one they are the parts themselves.

    Raises
    ------
    DataError
        If no mini-batch can be made of the samples.
    """
    return parts if count == 1 else Accumulated(parts, count)
