"""Predicted time of each method of a scan, and the selection of the fastest one.

A product takes a fixed time (a call, a kernel launch) plus the time of its arithmetic or of its memory traffic,
whichever is longer. The products of a level are one call for a Stack and one call each for a Chain. The non-zeros of
sparse matrices are assumed to be at random positions. A message takes alpha + bytes / beta. The prediction runs the
code of :mod:`.algorithm` with sizes in place of matrices, so it computes and sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from .algorithm import UpSweep, scan
from .checks import Problem, Size
from .elements import Level


@dataclass(frozen=True)
class Speed:
    """Speed of a rank."""

    call_s: float
    """Fixed time of a product."""
    level_s: float
    """Fixed time of the stacked products of a level, with their copies."""
    flops_per_s: float
    """FLOP per second of products of dense matrices."""
    sparse_flops_per_s: float
    """FLOP per second of products with a sparse matrix."""
    bytes_per_s: float
    """Memory bandwidth."""
    alpha_s: float
    """Fixed time of a message."""
    link_bytes_per_s: float
    """Bandwidth between ranks."""
    value_bytes: int = 4
    """Size of a value."""


SPEEDS = {
    "cpu": Speed(6e-6, 25e-6, 12e9, 0.15e9, 8e9, 15e-6, 5e9),
    "cuda": Speed(10e-6, 40e-6, 10e12, 20e9, 1.5e12, 30e-6, 10e9),
}
"""By device type: one core of a small machine, fitted to measurements; a GPU, estimated from data sheets."""


@dataclass(frozen=True)
class ScanPrediction:
    """Predicted time of each method."""

    times_s: dict[str, float]
    """Seconds, by method."""
    depth: int
    """Number of levels of the up-sweep on each rank with which the truncated method is fastest."""

    @property
    def method(self) -> str:
        """The fastest method; of several, the first in ``times_s``, which is the simplest."""
        return min(self.times_s, key=lambda method: self.times_s[method])

    def __str__(self) -> str:
        times = ", ".join(f"{method} {1e3 * time:.3g} ms" for method, time in self.times_s.items())
        return f"{self.method}; predicted: {times}, truncated after {self.depth} levels"


@lru_cache(maxsize=4096)
def predict(problem: Problem, speed: Speed) -> ScanPrediction:
    """Predict the time of each method for a problem on all its ranks.

    Parameters
    ----------
    problem : Problem
        The shapes on all ranks.
    speed : Speed
        Speed of each rank.

    Returns
    -------
    ScanPrediction
        The times until the slowest rank is finished.

    Examples
    --------
    >>> problem = Problem((1, 20), "", ((Size(20, 20, count=1000),),), stacked=True)
    >>> times = predict(problem, SPEEDS["cpu"]).times_s
    >>> times["blelloch"] < times["linear"]
    True
    """
    deepest = max(problem.count_on_rank(rank) for rank in problem.active).bit_length()
    blelloch = _sweep_time(problem, speed, None)
    # A chain of one element has no level to truncate.
    truncated = {depth: _sweep_time(problem, speed, depth) for depth in range(1, deepest)} or {1: blelloch}
    depth = min(truncated, key=lambda levels: truncated[levels])
    return ScanPrediction(
        {"linear": _linear_time(problem, speed), "blelloch": blelloch, "truncated": truncated[depth]}, depth
    )


def _linear_time(problem: Problem, speed: Speed) -> float:
    """Return the seconds of the linear method: one rank after another."""
    clock = _Clock(problem, speed)
    for sizes, ranks in Counter(problem.ranks).items():
        # Ranks with the same Jacobians take the same time: only one of them is simulated.
        before = clock.seconds
        clock.timed_level(sizes).apply_in_order(None)
        clock.seconds += (ranks - 1) * (clock.seconds - before)
    # One message from each rank to the next.
    for rank in problem.active[:-1]:
        clock.add_message(problem.gradient[0] * problem.widths[rank])
    return clock.seconds


def _sweep_time(problem: Problem, speed: Speed, depth: int | None) -> float:
    """Return the seconds of a scan: the slowest rank before the exchange, the exchange, the slowest rank after it.

    The first rank computes its vectors before the exchange, without products of matrices with its last element. Each
    level of the exchange is counted with the largest product of any rank.
    """
    clock = _Clock(problem, speed)
    level = clock.timed_level(problem.ranks[0])
    # Vectors are None: elements add their time to the clock and compute nothing.
    scan(cast(Any, None), cast(Level, level[:-1]), depth)
    level[-1:].apply_in_order(None)
    up, down, largest = [clock.seconds], [0.0], Size(0, 0)
    # Ranks with equal Jacobians take the same time, so each kind is simulated once.
    for sizes in dict.fromkeys(problem.ranks[rank] for rank in problem.active[1:]):
        clock = _Clock(problem, speed)
        tree = UpSweep.build(cast(Level, clock.timed_level(sizes)), depth)
        total = cast(_TimedMap, tree.product()).size or Size(0, 0)
        largest = max(largest, total, key=lambda size: size.rows * size.cols)
        up.append(clock.seconds)
        tree.down_sweep(cast(Any, None))
        down.append(clock.seconds - up[-1])
    clock = _Clock(problem, speed)
    # One exchange up and one down for each level over the ranks.
    for _ in range((len(problem.active) - 1).bit_length()):
        clock.add_message(max(largest.batch, 1) * largest.rows * largest.cols * largest.density)
        clock.add_call(clock.matrix_matrix_time(largest, largest))
        clock.add_message(problem.gradient[0] * largest.rows)
        clock.add_call(clock.matrix_vector_time(largest))
    # Each part ends when its slowest rank does.
    return max(up) + clock.seconds + max(down)


class _Clock:
    """Sum of the time of one rank."""

    def __init__(self, problem: Problem, speed: Speed) -> None:
        self.problem, self.speed, self.seconds = problem, speed, 0.0

    def timed_level(self, sizes: Sequence[Size | None]) -> _TimedLevel:
        return _TimedLevel(self, [size for size in sizes for _ in range(1 if size is None else size.count)])

    def add_call(self, work_s: float) -> None:
        self.seconds += self.speed.call_s + work_s

    def add_message(self, values: float) -> None:
        self.seconds += self.speed.alpha_s + values * self.speed.value_bytes / self.speed.link_bytes_per_s

    def matrix_vector_time(self, size: Size) -> float:
        nonzeros = size.rows * size.cols * size.density
        rate = self.speed.flops_per_s if size.density == 1 else self.speed.sparse_flops_per_s
        moved = nonzeros * size.batch * self.speed.value_bytes
        return max(2 * nonzeros * self.problem.gradient[0] / rate, moved / self.speed.bytes_per_s)

    def matrix_matrix_time(self, second: Size, first: Size) -> float:
        both = second.density * first.density
        rate = self.speed.flops_per_s if both == 1 else self.speed.sparse_flops_per_s
        batch = max(second.batch, first.batch)
        flops = 2 * second.rows * second.cols * first.cols * both * batch
        moved = (second.rows + second.cols) * first.cols * batch * self.speed.value_bytes
        return max(flops / rate, moved / self.speed.bytes_per_s)


class _TimedMap:
    """An element that adds its time to the clock instead of computing."""

    def __init__(self, clock: _Clock, size: Size | None) -> None:
        self.clock, self.size = clock, size

    def __call__(self, vector: None) -> None:
        if self.size is not None:
            self.clock.add_call(self.clock.matrix_vector_time(self.size))

    def compose_after(self, first: _TimedMap) -> _TimedMap:
        if self.size is None or first.size is None:
            return _TimedMap(self.clock, self.size or first.size)
        self.clock.add_call(self.clock.matrix_matrix_time(self.size, first.size))
        return _TimedMap(self.clock, _product(self.size, first.size))


def _product(second: Size, first: Size) -> Size:
    """Return the expected size of a product of matrices whose non-zeros are at random positions."""
    # Each of its elements is a sum of `second.cols` terms, of which any may be non-zero.
    density = 1 - (1 - second.density * first.density) ** second.cols
    return Size(second.rows, first.cols, density, max(second.batch, first.batch))


class _TimedLevel:
    """A level that adds its time to the clock instead of computing; vectors are None."""

    def __init__(self, clock: _Clock, sizes: Sequence[Size | None]) -> None:
        self.clock, self.sizes = clock, sizes
        # Of a Stack, whose products of a level are one call.
        self._common_size = sizes[0] if clock.problem.stacked and sizes else None

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        return (_TimedLevel if isinstance(index, slice) else _TimedMap)(self.clock, cast(Any, self.sizes[index]))

    def combine_pairs(self) -> _TimedLevel:
        count, firsts, seconds = len(self) // 2, self[::2], self[1::2]
        if self._common_size is not None:
            if count:
                self.clock.seconds += self.clock.speed.level_s + count * self.clock.matrix_matrix_time(
                    self._common_size, self._common_size
                )
            return _TimedLevel(self.clock, self.sizes[:count])
        return _TimedLevel(self.clock, [seconds[i].compose_after(firsts[i]).size for i in range(count)])

    def apply_in_order(self, vector: None) -> list[None]:
        if self._common_size is not None:
            self.clock.seconds += len(self) * (
                self.clock.speed.call_s + self.clock.matrix_vector_time(self._common_size)
            )
        else:
            for size in self.sizes:
                _TimedMap(self.clock, size)(None)
        return [None] * len(self)

    def down_sweep(self, vector: None, above: Sequence[None]) -> list[None]:
        if self._common_size is not None:
            self.clock.seconds += self.clock.speed.level_s + -(-len(self) // 2) * self.clock.matrix_vector_time(
                self._common_size
            )
        else:
            self[::2].apply_in_order(None)
        return [None] * (len(self) + 1)
