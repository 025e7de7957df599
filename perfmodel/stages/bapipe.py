"""BaPipe's balanced partition: one accelerator per stage, in a daisy chain.

1. Inter-layer: cuts near equal time (Eq. 1), then single cuts move while that helps.
2. If a boundary takes longer than the slowest stage: only cuts that carry at most a_th = T BW, and step 1 again. The
   faster of both results stays.
3. Otherwise intra-layer: the layers at the cuts are shared between the stages beside them, if that is faster.
4. If a stage has too little memory, as shared or with whole layers, cuts move until all fit.

Source: Zhao et al. 2020 (BaPipe), 3.3. The paper leaves open how steps 1 and 4 iterate; here every cut may move to the
next one allowed, and the move that lowers the sorted stage times most is taken; step 2 as printed
may end slower than step 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distconv.perfmodel.stages.devices import PartitionError, kinds_in_order
from distconv.perfmodel.stages.dynamic_program import chain
from distconv.perfmodel.stages.memory import does_not_fit, excess, least_memory
from distconv.perfmodel.stages.stage_costs import Array, Counts, StageRange, Terms, staged

BISECTIONS = 60
"""Each halves the range of the time of a shared partition: down to rounding."""


def balanced(terms: Terms) -> tuple[list[int], list[StageRange]]:
    """The cuts between whole layers, and the stages, which may share the layers at the cuts.

    Raises
    ------
    PartitionError
        If there are more devices than layers, or no partition fits their memory.
    """
    chain = DeviceChain(terms)
    allowed = list(range(1, terms.size))
    cuts = chain.improved(chain.start(allowed), allowed)
    positions: Sequence[float] = cuts
    if chain.slowest_boundary(cuts) > chain.slowest_stage(cuts):
        small = chain.coarse()
        positions = cuts = min(cuts, chain.improved(chain.start(small), small), key=chain.time)
    else:
        cuts, positions = chain.shared(cuts)
    if excess(terms, chain.stages(positions)) or excess(terms, chain.stages(cuts)):
        positions = cuts = chain.tuned(cuts)
    return list(cuts), chain.stages(positions)


class DeviceChain:
    """The devices of ``terms`` one after the other, one stage each.

    Raises
    ------
    PartitionError
        If there are more devices than layers.
    """

    def __init__(self, terms: Terms) -> None:
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
        """Stages between cuts."""
        return staged([0, *positions, self.terms.size], self.counts)

    def works(self, positions: Sequence[float]) -> list[float]:
        """Seconds of each stage."""
        return [float(self.terms.stage(s.first, s.last, s.counts)) for s in self.stages(positions)]

    def slowest_stage(self, positions: Sequence[float]) -> float:
        """Seconds of the slowest stage."""
        return max(self.works(positions))

    def slowest_boundary(self, positions: Sequence[float]) -> float:
        """Seconds of the slowest boundary."""
        return max((float(self.terms.boundary(position, 1)) for position in positions), default=0.0)

    def time(self, positions: Sequence[float]) -> float:
        """Seconds of the slower of both."""
        return self.terms.time(self.stages(positions))

    def ideal(self) -> float:
        """Seconds of each stage if layers could be cut anywhere and all were alike (Eq. 1)."""
        totals = [float(self.terms.seconds[kind][-1]) for kind in self.kinds]
        return 1 / sum(1 / total for total in totals) if min(totals) > 0 else 0.0

    # -- 1. between layers --------------------------------------------------------------------------------------------

    def start(self, allowed: Sequence[int]) -> list[int]:
        """Cuts among those allowed, each where its stage reaches the ideal time most closely."""
        cuts: list[int] = []
        for index, kind in enumerate(self.kinds[:-1]):
            first = bisect.bisect_right(allowed, cuts[-1] if cuts else 0)
            last = len(allowed) - (len(self.kinds) - 2 - index)
            sums = self.terms.seconds[kind]
            target = sums[cuts[-1] if cuts else 0] + self.ideal()
            cuts.append(min(allowed[first:last], key=lambda cut: abs(float(sums[cut] - target))))
        return cuts

    def improved(self, cuts: Sequence[int], allowed: Sequence[int]) -> list[int]:
        """Cuts after all moves of single cuts that lower first the bytes too many, then the sorted stage times."""

        def key(candidate: list[int]) -> tuple[float, list[float]]:
            return excess(self.terms, self.stages(candidate)), sorted(self.works(candidate), reverse=True)

        best = list(cuts)
        while key(nearest := min(_neighbours(best, allowed), key=key, default=best)) < key(best):
            best = nearest
        return best

    # -- 2. where boundaries are small --------------------------------------------------------------------------------

    def coarse(self) -> list[int]:
        """Cuts that carry at most a_th = T BW; the smallest ones if those are fewer than the stages need."""
        carried = self.terms.boundary(self.terms.edges, 1)
        cuts = sorted(range(1, self.terms.size), key=lambda cut: (float(carried[cut]), cut))
        needed = len(self.kinds) - 1
        small = [cut for cut in cuts if carried[cut] <= self.ideal()]
        return sorted(small if len(small) >= needed else cuts[:needed])

    # -- 3. inside of layers ------------------------------------------------------------------------------------------

    def shared(self, cuts: list[int]) -> tuple[list[int], Sequence[float]]:
        """Cuts, and positions at most one layer from ``cuts`` whose slowest stage takes least; else ``cuts`` for both.

        Where a position is that of a whole layer, so is the cut. Positions count only if they are faster and each stage
        has a layer of its own at the cuts.
        """
        positions = self._evenest(cuts)
        whole = [int(at) if at == int(at) else cut for cut, at in zip(cuts, positions, strict=True)]
        each = all(a < b for a, b in pairwise([0, *whole, self.terms.size]))
        return (whole, positions) if each and self.time(positions) < self.time(cuts) else (cuts, cuts)

    def _evenest(self, cuts: Sequence[int]) -> list[float]:
        low, high = 0.0, self.slowest_stage(cuts)
        best: list[float] = list(cuts)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            filled = self._filled(cuts, middle)
            if filled is None:
                low = middle
            else:
                best, high = filled, middle
        return best

    def _filled(self, cuts: Sequence[int], limit: float) -> list[float] | None:
        """Each stage from where the one before ends, as far as ``limit`` seconds reach; None if that is not enough."""
        grid = self.terms.edges
        positions: list[float] = []
        for kind, cut in zip(self.kinds, [*cuts, self.terms.size], strict=False):
            sums: Array = self.terms.seconds[kind]
            begin = positions[-1] if positions else 0.0
            reached = _whole(float(np.interp(np.interp(begin, grid, sums) + limit, sums, grid)))
            if reached < (cut - 1 if cut < self.terms.size else cut):
                return None
            positions.append(min(reached, cut + 1))
        return positions[:-1]

    # -- 4. memory ----------------------------------------------------------------------------------------------------

    def tuned(self, cuts: Sequence[int]) -> list[int]:
        """Cuts that fit the memory, if there are any, near ``cuts`` if moving those is enough."""
        allowed = range(1, self.terms.size)
        tuned_cuts = self.improved(cuts, allowed)
        if not excess(self.terms, self.stages(tuned_cuts)):
            return tuned_cuts
        moves = chain(self.counts)
        emptiest = least_memory(self.terms, moves)
        assert emptiest is not None
        if excess(self.terms, emptiest):
            raise does_not_fit(self.terms, moves)
        return self.improved([int(stage.first) for stage in emptiest[1:]], allowed)


def _neighbours(cuts: list[int], allowed: Sequence[int]) -> list[list[int]]:
    """All cuts of which one, all being allowed, is the next or the previous one allowed, still in increasing order."""
    neighbours = []
    for index, cut in enumerate(cuts):
        place = allowed.index(cut)
        for other in (place - 1, place + 1):
            if 0 <= other < len(allowed):
                moved = [*cuts[:index], allowed[other], *cuts[index + 1 :]]
                if all(a < b for a, b in pairwise(moved)):
                    neighbours.append(moved)
    return neighbours


def _whole(position: float) -> float:
    """``position``, or the whole layer that it misses by rounding alone."""
    return float(round(position)) if abs(position - round(position)) < 1e-9 else position
