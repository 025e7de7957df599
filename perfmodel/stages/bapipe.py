"""BaPipe's balanced partition: one accelerator per stage, in a daisy chain.

1. Inter-layer partition (3.3.1): split points near equal time (Eq. 1), then single split points move while that helps.
2. Coarse-grained partition (3.3.3): if a boundary takes longer than the slowest stage, use only split points that carry
   at most a_th = T BW bytes, and repeat step 1. T is the ideal time of a stage (Eq. 1), BW the bandwidth. The faster of
   both results stays.
3. Otherwise intra-layer partition (3.3.2): the layers at the split points are shared between the adjacent stages, if
   that is faster.
4. If a stage exceeds its memory, split points move until all stages fit.

Source: Zhao et al. 2020 (BaPipe), 3.3. The paper does not specify how steps 1 and 4 iterate. Here every split point may
move to the next allowed one, and the move that lowers the sorted stage times most is taken. Step 2 as printed may end
slower than step 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distconv.perfmodel.stages.devices import PartitionError, kinds_in_order
from distconv.perfmodel.stages.dynamic_program import fixed_moves
from distconv.perfmodel.stages.memory import excess_bytes, least_memory, no_fit_error
from distconv.perfmodel.stages.stage_costs import Array, Counts, PrefixSums, StageRange, stages_between

BISECTIONS = 60
"""Halvings of the range of the time of a shared partition, until only rounding is left."""


def balanced_partition(terms: PrefixSums) -> tuple[list[int], list[StageRange]]:
    """Return the split points between layers, and the stages, which may share the layers at the split points.

    Source: Zhao et al. 2020 (BaPipe), 3.3.

    Parameters
    ----------
    terms : PrefixSums
        Costs on the devices.

    Returns
    -------
    cuts : list of int
        Split points between layers.
    stages : list of StageRange

    Raises
    ------
    PartitionError
        If there are more devices than layers, or no partition fits their memory.
    """
    chain = DeviceChain(terms)
    allowed = list(range(1, terms.size))
    cuts = chain.improve(chain.start_cuts(allowed), allowed)  # step 1
    positions: Sequence[float] = cuts
    # Steps 2 and 3 exclude each other: a shared layer makes a boundary carry more.
    if chain.slowest_boundary(cuts) > chain.slowest_stage(cuts):
        small = chain.coarse_cuts()  # step 2
        positions = cuts = min(cuts, chain.improve(chain.start_cuts(small), small), key=chain.time)
    else:
        cuts, positions = chain.share_layers(cuts)  # step 3
    if excess_bytes(terms, chain.stages(positions)) or excess_bytes(terms, chain.stages(cuts)):
        positions = cuts = chain.tune(cuts)  # step 4
    return list(cuts), chain.stages(positions)


class DeviceChain:
    """Devices of ``terms`` in a chain, one stage each.

    Positions are split points in layers; fractions share a layer.

    Raises
    ------
    PartitionError
        If there are more devices than layers.
    """

    def __init__(self, terms: PrefixSums) -> None:
        self.terms = terms
        self.kinds = kinds_in_order(terms.devices)
        width = len(terms.devices)
        self.counts: list[Counts] = [tuple(int(kind == own) for kind in range(width)) for own in self.kinds]
        if len(self.kinds) > terms.size:
            raise PartitionError(
                f"partition: 'bapipe' gives each of the {len(self.kinds)} devices a stage of its own, but there are "
                f"only {terms.size} layers; use at most {terms.size} devices, or another method"
            )

    def stages(self, positions: Sequence[float]) -> list[StageRange]:
        """Return the stages between some positions."""
        return stages_between([0, *positions, self.terms.size], self.counts)

    def stage_times(self, positions: Sequence[float]) -> list[float]:
        """Return the seconds of each stage."""
        return [float(self.terms.stage_time(s.first, s.last, s.counts)) for s in self.stages(positions)]

    def slowest_stage(self, positions: Sequence[float]) -> float:
        """Return the seconds of the slowest stage."""
        return max(self.stage_times(positions))

    def slowest_boundary(self, positions: Sequence[float]) -> float:
        """Return the seconds of the slowest boundary."""
        return max((float(self.terms.boundary_time(position, 1)) for position in positions), default=0.0)

    def time(self, positions: Sequence[float]) -> float:
        """Return the seconds of the slowest stage or boundary."""
        return self.terms.time(self.stages(positions))

    def ideal_time(self) -> float:
        """Return the seconds of each stage if layers were uniform and could be split anywhere.

        Source: Zhao et al. 2020 (BaPipe), Eq. 1.
        """
        totals = [float(self.terms.seconds[kind][-1]) for kind in self.kinds]
        return 1 / sum(1 / total for total in totals) if min(totals) > 0 else 0.0

    # -- 1. between layers --------------------------------------------------------------------------------------------

    def start_cuts(self, allowed: Sequence[int]) -> list[int]:
        """Return split points among the allowed ones, each closest to the ideal time of its stage."""
        cuts: list[int] = []
        for index, kind in enumerate(self.kinds[:-1]):
            # After the previous split point, and leaving one allowed position for each later one.
            first = bisect.bisect_right(allowed, cuts[-1] if cuts else 0)
            last = len(allowed) - (len(self.kinds) - 2 - index)
            sums = self.terms.seconds[kind]
            target = sums[cuts[-1] if cuts else 0] + self.ideal_time()
            cuts.append(min(allowed[first:last], key=lambda cut: abs(float(sums[cut] - target))))
        return cuts

    def improve(self, cuts: Sequence[int], allowed: Sequence[int]) -> list[int]:
        """Move single split points while that lowers first the bytes beyond the memory, then the sorted stage times.

        Parameters
        ----------
        cuts : sequence of int
            Split points to start from.
        allowed : sequence of int
            Allowed split points, ascending.

        Returns
        -------
        list of int
            The improved split points.
        """

        def key(candidate: list[int]) -> tuple[float, list[float]]:
            return excess_bytes(self.terms, self.stages(candidate)), sorted(self.stage_times(candidate), reverse=True)

        # The sorted times, and not the largest alone: of several equally slow stages each must be relieved.
        best = list(cuts)
        while key(nearest := min(_neighbours(best, allowed), key=key, default=best)) < key(best):
            best = nearest
        return best

    # -- 2. where boundaries are small --------------------------------------------------------------------------------

    def coarse_cuts(self) -> list[int]:
        """Return the split points that carry at most a_th = T BW bytes.

        If there are fewer of them than the stages need, those that carry least are returned.

        Source: Zhao et al. 2020 (BaPipe), 3.3.3.
        """
        carried = self.terms.boundary_time(self.terms.edges, 1)
        cuts = sorted(range(1, self.terms.size), key=lambda cut: (float(carried[cut]), cut))
        needed = len(self.kinds) - 1
        small = [cut for cut in cuts if carried[cut] <= self.ideal_time()]
        return sorted(small if len(small) >= needed else cuts[:needed])

    # -- 3. within layers ---------------------------------------------------------------------------------------------

    def share_layers(self, cuts: list[int]) -> tuple[list[int], Sequence[float]]:
        """Return split points, and positions at most one layer from ``cuts`` with the least time of the slowest stage.

        Positions are used if they are faster and each stage keeps a layer of its own at the split points. Otherwise
        both results are ``cuts``.

        Source: Zhao et al. 2020 (BaPipe), 3.3.2.
        """
        positions = self._most_even_positions(cuts)
        between = [int(at) if at == int(at) else cut for cut, at in zip(cuts, positions, strict=True)]
        keeps_layers = all(a < b for a, b in pairwise([0, *between, self.terms.size]))
        return (between, positions) if keeps_layers and self.time(positions) < self.time(cuts) else (cuts, cuts)

    def _most_even_positions(self, cuts: Sequence[int]) -> list[float]:
        # Bisection of the time of the slowest stage: `cuts` reach `high`, and nothing reaches less than `low`.
        low, high = 0.0, self.slowest_stage(cuts)
        best: list[float] = list(cuts)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            filled = self._fill_stages(cuts, middle)
            if filled is None:
                low = middle
            else:
                best, high = filled, middle
        return best

    def _fill_stages(self, cuts: Sequence[int], limit: float) -> list[float] | None:
        """Fill each stage up to ``limit`` seconds and return the positions; None if the layers do not fit."""
        grid = self.terms.edges
        positions: list[float] = []
        for kind, cut in zip(self.kinds, [*cuts, self.terms.size], strict=False):
            sums: Array = self.terms.seconds[kind]
            begin = positions[-1] if positions else 0.0
            reached = float(np.interp(np.interp(begin, grid, sums) + limit, sums, grid))
            # A position that rounding has moved off a split point between layers would share a layer in vain.
            if abs(reached - round(reached)) < 1e-9:
                reached = float(round(reached))
            # At most one layer from `cut`, on either side.
            if reached < (cut - 1 if cut < self.terms.size else cut):
                return None
            positions.append(min(reached, cut + 1))
        return positions[:-1]

    # -- 4. memory ----------------------------------------------------------------------------------------------------

    def tune(self, cuts: Sequence[int]) -> list[int]:
        """Return split points that fit the memory, near ``cuts`` if moving those is enough.

        Raises
        ------
        PartitionError
            If none fit.
        """
        allowed = range(1, self.terms.size)
        tuned_cuts = self.improve(cuts, allowed)
        if not excess_bytes(self.terms, self.stages(tuned_cuts)):
            return tuned_cuts
        moves = fixed_moves(self.counts)
        emptiest = least_memory(self.terms, moves)
        assert emptiest is not None
        if excess_bytes(self.terms, emptiest):
            raise no_fit_error(self.terms, moves)
        return self.improve([int(stage.first) for stage in emptiest[1:]], allowed)


def _neighbours(cuts: list[int], allowed: Sequence[int]) -> list[list[int]]:
    """Return all split points with one moved to the next or previous allowed position, still in increasing order."""
    neighbours = []
    for index, cut in enumerate(cuts):
        position_index = allowed.index(cut)
        for other in (position_index - 1, position_index + 1):
            if 0 <= other < len(allowed):
                moved = [*cuts[:index], allowed[other], *cuts[index + 1 :]]
                if all(a < b for a, b in pairwise(moved)):
                    neighbours.append(moved)
    return neighbours
