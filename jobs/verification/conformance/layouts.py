"""How the tensors of a case are split: one layout per kind of grid, with extents that make it what it is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.jobs.verification.conformance.case import Case, Input, Sizes

USUAL: Sizes = {"n": 5, "d": 5, "h": 7, "w": 9}
CHANNELS = 4


@dataclass(frozen=True)
class Layout:
    """A grid and the extents of a case on it."""

    kind: str
    extents: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, int], ...]
    blocks: str = "balanced"
    """``uneven`` and ``cyclic`` blocks are those along the axes of the grid; ``whole``: nothing is split."""

    def distribution(self, grid: ProcessGrid, given: Input) -> Distribution:
        """Layout of one input."""
        shape, axes = given.shape(dict(self.sizes)), given.axes()
        if self.blocks == "whole":
            return Distribution(grid, (None,) * len(shape))
        extents = {axis: n for axis, n in zip(axes, shape, strict=True) if axis and grid.shape[axis] > 1}
        if given.layout == "balanced" or self.blocks == "balanced":
            return Distribution(grid, axes)
        if self.blocks == "cyclic":
            return Distribution(grid, axes, cyclic={a: 2 if n > 2 * grid.shape[a] else 1 for a, n in extents.items()})
        return Distribution(grid, axes, boundaries={axis: _rising(n, grid.shape[axis]) for axis, n in extents.items()})


def _rising(extent: int, parts: int) -> tuple[int, ...]:
    """Boundaries of blocks that grow, the first of which may be empty."""
    return tuple(extent * i * i // parts**2 for i in range(parts + 1))


def _factors(ranks: int) -> tuple[int, int] | None:
    """Two extents above one, if there are any."""
    first = next((n for n in (2, 3, 5, 7) if ranks % n == 0 and ranks > n), None)
    return None if first is None else (first, ranks // first)


def _channels(case: Case, ranks: int) -> int:
    """A number of channels that ``ranks`` divides, with more than one each where that stays small."""
    step = math.lcm(case.multiple, ranks)
    return step * math.ceil(6 / step)


def _ragged(case: Case, ranks: int) -> int | None:
    """A number of channels, more than ranks, that ``ranks`` does not divide."""
    numbers = range(case.multiple, 8 * ranks + 1, case.multiple)
    return next((n for n in numbers if n > max(ranks, 4) and n % ranks), None)


Extents = dict[str, int]
Kind = Callable[[Case, int], tuple[Extents, Extents] | None]
"""From a case and the number of ranks the extents of the grid and the sizes that differ from the usual ones."""


def _along(axis: str) -> Kind:
    return lambda case, ranks: ({axis: ranks}, {})


def _in_space(case: Case, ranks: int) -> tuple[Extents, Extents]:
    return {(case.spatial() or ["n"])[0]: ranks}, {}


def _pair(case: Case, ranks: int, first: str, second: str | None) -> tuple[Extents, Extents] | None:
    factors = _factors(ranks)
    return None if factors is None or second is None else ({first: factors[0], second: factors[1]}, {})


def _space(case: Case, number: int) -> str | None:
    return case.spatial()[number] if len(case.spatial()) > number else None


def _hybrid(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    return _pair(case, ranks, "n", _space(case, 0))


def _two_in_space(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    return _pair(case, ranks, _space(case, 0) or "", _space(case, 1))


def _replicas_in_space(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    return _pair(case, ranks, "r", _space(case, 0) or "n")


def _empty_space(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    axis = _space(case, 0)
    return None if axis is None else ({axis: ranks}, {axis: case.least.get(axis, 1)})


def _ragged_channels(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    channels = _ragged(case, ranks)
    return None if channels is None else ({"c": ranks}, {"c": channels})


def _empty_channels(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
    return ({"c": ranks}, {"c": case.multiple}) if case.multiple < ranks else None


def _channels_and(other: Callable[[Case], str | None]) -> Kind:
    def kind(case: Case, ranks: int) -> tuple[Extents, Extents] | None:
        found = _pair(case, ranks, "c", other(case))
        return None if found is None else (found[0], {"c": _channels(case, found[0]["c"])})

    return kind


KINDS: dict[str, tuple[Kind, str]] = {
    "samples": (_along("n"), "balanced"),
    "depth": (_along("d"), "balanced"),
    "height": (_along("h"), "balanced"),
    "width": (_along("w"), "balanced"),
    "samples + space": (_hybrid, "balanced"),
    "two in space": (_two_in_space, "balanced"),
    "uneven": (_in_space, "uneven"),
    "cyclic": (_in_space, "cyclic"),
    "empty samples": (lambda case, ranks: ({"n": ranks}, {"n": 1}), "balanced"),
    "empty space": (_empty_space, "balanced"),
    "nothing split": (_along("n"), "whole"),
    "replicas": (_along("r"), "balanced"),
    "replicas + space": (_replicas_in_space, "balanced"),
    "channels": (lambda case, ranks: ({"c": ranks}, {"c": _channels(case, ranks)}), "balanced"),
    "ragged channels": (_ragged_channels, "balanced"),
    "empty channels": (_empty_channels, "balanced"),
    "channels + samples": (_channels_and(lambda case: "n"), "balanced"),
    "channels + space": (_channels_and(lambda case: _space(case, 0)), "balanced"),
}
"""Every kind of layout, and its blocks."""


def layouts(case: Case, ranks: int) -> list[Layout]:
    """The layouts over ``ranks`` that split what ``case`` has."""
    found = []
    for name, (kind, blocks) in KINDS.items():
        made = kind(case, ranks) if case.kinds is None or name in case.kinds else None
        if made is None:
            continue
        extents, changed = made
        if blocks == "whole" or set(extents) <= case.axes() | {"r"}:
            found.append(Layout(name, tuple(extents.items()), _sizes(case, changed), blocks))
    return found


def _sizes(case: Case, changed: Extents) -> tuple[tuple[str, int], ...]:
    usual_channels = case.multiple * math.ceil(CHANNELS / case.multiple)
    return tuple({**USUAL, "c": usual_channels, **case.sizes, **changed}.items())
