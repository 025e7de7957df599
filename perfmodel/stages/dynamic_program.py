"""Dynamic programming over (layers placed, devices used), for any set of allowed device groups.

::

    used:   0 --- group --> u --- group --> ... --> all devices
    layers: [0, k)          [k, j)                  [.., L)

C(j, used) is the minimum, over k and the group that ends at ``used``, of max(C(k, used before), boundary at k, cost of
the stage). Costs are arguments, so that BaPipe, :func:`.partition` and :func:`.explore` share the search.

Source: Zhai et al. 2020 (SparsePipe), Eq. 5, Algorithm 1; Narayanan et al. 2019 (PipeDream), 3.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distconv.perfmodel.stages.stage_costs import Array, Counts, StageRange, devices_onward


@dataclass(frozen=True)
class StageMove:
    """Stage on some devices, as a transition between sets of used devices.

    Attributes
    ----------
    before, after : tuple of int
        Keys of the devices used before and after the stage.
    counts : tuple of int
        Devices of each kind in the stage.
    onward : int
        Devices of this stage and of all later ones: those that ``before`` leaves unused.
    """

    before: Counts
    after: Counts
    counts: Counts
    onward: int


def any_groups(available: Counts) -> Iterator[StageMove]:
    """Yield every group of unused devices for every set of used devices.

    Keys are the numbers of used devices of each kind. The number of moves is the product of (c + 1)(c + 2) / 2 over the
    kinds.

    Parameters
    ----------
    available : tuple of int
        Devices of each kind.

    Yields
    ------
    StageMove
    """
    total = sum(available)
    # In lexicographic order, each key comes after all keys from which moves lead to it, and `available` is the last.
    for after in _counts_up_to(available):
        for before in _counts_up_to(after):
            if before != after:
                counts = tuple(a - b for a, b in zip(after, before, strict=True))
                yield StageMove(before, after, counts, total - sum(before))


def successive_groups(order: Sequence[int], kinds: int) -> Iterator[StageMove]:
    """Yield groups of successive devices in one order. Keys are numbers of devices.

    Source: Zhai et al. 2020 (SparsePipe), Algorithm 1.

    Parameters
    ----------
    order : sequence of int
        Kind of each device.
    kinds : int
        Number of kinds.

    Yields
    ------
    StageMove

    Examples
    --------
    >>> [move.counts for move in successive_groups([1, 0], kinds=2)]
    [(0, 1), (1, 1), (1, 0)]
    """
    for after in range(1, len(order) + 1):
        for before in range(after):
            held = order[before:after]
            yield StageMove((before,), (after,), tuple(map(held.count, range(kinds))), len(order) - before)


def fixed_moves(groups: Sequence[Counts]) -> list[StageMove]:
    """Return the moves of fixed groups, one after the other. Keys are numbers of groups."""
    devices = devices_onward(groups)
    return [StageMove((index,), (index + 1,), counts, devices[index]) for index, counts in enumerate(groups)]


def cheapest_stages(
    size: int, moves: Sequence[StageMove], work: Callable[[StageMove], Array], carry: Callable[[StageMove], Array]
) -> list[StageRange] | None:
    """Return the stages whose largest cost is least. The time is O(moves size^2), the memory O(keys size).

    Source: Zhai et al. 2020 (SparsePipe), Eq. 5.

    Parameters
    ----------
    size : int
        Number of layers.
    moves : sequence of StageMove
        In an order in which all moves that lead to a key come before those that leave it. The last one leads to the
        end. Of equal ones the first is taken.
    work : callable
        ``work(move)[k, j]`` is the cost of layers k to j; infinite if not allowed.
    carry : callable
        ``carry(move)[k]`` is the cost of the boundary before layer k.

    Returns
    -------
    list of StageRange or None
        None if the cost is infinite for all.
    """
    start = np.full(size + 1, np.inf)
    start[0] = 0.0
    costs = {moves[0].before: start}
    origin: dict[Counts, tuple[Array, list[StageMove | None]]] = {}
    forward = np.arange(size + 1)[:, None] < np.arange(size + 1)[None, :]
    # costs[key][j] is C(j, key). Moves are sorted, so it is final before the first move that leaves the key.
    for move in moves:
        so_far = np.maximum(costs[move.before], carry(move))[:, None]
        candidates = np.where(forward, np.maximum(so_far, work(move)), np.inf)
        where = candidates.argmin(axis=0)
        times = np.take_along_axis(candidates, where[None], axis=0)[0]
        best = costs.setdefault(move.after, np.full(size + 1, np.inf))
        cuts, through = origin.setdefault(move.after, (np.zeros(size + 1, dtype=int), [None] * (size + 1)))
        # Strictly less, so that of equal moves the first is taken.
        better = times < best
        best[better], cuts[better] = times[better], where[better]
        for j in np.flatnonzero(better):
            through[j] = move
    return _trace_back(moves[-1].after, size, origin)


def _trace_back(
    end: Counts, size: int, origin: dict[Counts, tuple[Array, list[StageMove | None]]]
) -> list[StageRange] | None:
    stages: list[StageRange] = []
    key, last = end, size
    while last:
        cuts, through = origin[key]
        move = through[last]
        if move is None:
            return None
        first = int(cuts[last])
        stages.append(StageRange(first, last, move.counts, move.onward))
        key, last = move.before, first
    return stages[::-1]


def _counts_up_to(most: Counts) -> Iterator[Counts]:
    return itertools.product(*(range(count + 1) for count in most))
