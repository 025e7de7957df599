"""Layouts of a case: one for each kind of grid, with tensor sizes that produce the blocks of that kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.memory_format import named_format

Extents = dict[str, int]

USUAL: Extents = {"n": 5, "d": 5, "h": 7, "w": 9}
CHANNELS = 4
CHANNELS_LAST = "channels_last"
"""The kind of layouts whose inputs have this memory format."""

SPATIAL = ("d", "h", "w")


@dataclass(frozen=True)
class CaseLayout:
    """A grid, and the extents of a case on it."""

    kind: str
    extents: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    """Size of each letter, if the case has letters for sizes."""
    blocks: str = "balanced"
    """``balanced``, ``uneven`` or ``cyclic`` blocks along the axes of the grid, or ``whole`` if nothing is split."""
    first_only: bool = False
    """True distributes the first input only. Otherwise all inputs are distributed."""
    channels_last: bool = False
    """True gives inputs of 4 and 5 dimensions the memory format channels_last. Otherwise they are contiguous."""

    def in_memory_format(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input in the memory format of the layout.

        Parameters
        ----------
        tensor : torch.Tensor

        Returns
        -------
        torch.Tensor
        """
        if not self.channels_last:
            return tensor
        return tensor.contiguous(memory_format=named_format(CHANNELS_LAST, tensor.dim()))

    def distribution(
        self, grid: ProcessGrid, shape: Sequence[int], dims: Sequence[str | None], *, balanced: bool = False
    ) -> Distribution:
        """Return the distribution of a tensor.

        Parameters
        ----------
        grid : ProcessGrid
        shape : sequence of int
            Global shape.
        dims : sequence of str or None
            Grid axes that may split each dimension.
        balanced : bool
            True for blocks whose sizes differ by at most one, whatever the layout requires.

        Returns
        -------
        Distribution
        """
        if self.blocks == "whole":
            return Distribution(grid, (None,) * len(shape))
        axes = [letters and next((a for a in letters if grid.shape[a] > 1), letters[0]) for letters in dims]
        extents = {axis: n for axis, n in zip(axes, shape, strict=True) if axis and grid.shape[axis] > 1}
        if balanced or self.blocks == "balanced":
            return Distribution(grid, axes)
        if self.blocks == "cyclic":
            return Distribution(grid, axes, cyclic={a: 2 if n > 2 * grid.shape[a] else 1 for a, n in extents.items()})
        return Distribution(grid, axes, boundaries={axis: _rising(n, grid.shape[axis]) for axis, n in extents.items()})


def _rising(extent: int, parts: int) -> tuple[int, ...]:
    """Return boundaries of blocks of increasing size, the first of which may be empty."""
    return tuple(extent * i * i // parts**2 for i in range(parts + 1))


class Splittable:
    """Base class of a case, with the properties that determine its layouts.

    The sizes of its inputs are given by letters (n, c, d, h, w), which a layout replaces by numbers, or are fixed.
    """

    kinds: Sequence[str] | None = None
    """Keys of ``KINDS``. None selects all kinds that split a dimension of the case."""
    least: Extents = {}  # noqa: RUF012
    """Smallest spatial sizes that torch accepts (default 1), for the layouts with empty blocks."""
    multiple: int = 0
    """Divisor of the number of channels, or 0 if the sizes are fixed."""
    sizes: Extents = {}  # noqa: RUF012
    """Sizes that replace those of ``USUAL``."""

    @property
    def axes(self) -> frozenset[str]:
        """Grid axes that may split one of its inputs."""
        return frozenset()


KINDS: dict[str, tuple[str, str, str]] = {
    "samples": ("n", "balanced", ""),
    "depth": ("d", "balanced", ""),
    "height": ("h", "balanced", ""),
    "width": ("w", "balanced", ""),
    "samples + space": ("n 1", "balanced", ""),
    "two in space": ("1 2", "balanced", ""),
    "uneven": ("1/n", "uneven", ""),
    "cyclic": ("1/n", "cyclic", ""),
    "empty samples": ("n", "balanced", "one"),
    "empty space": ("1", "balanced", "least"),
    "nothing split": ("n", "whole", ""),
    "replicas": ("r", "balanced", ""),
    "replicas + space": ("r 1/n", "balanced", ""),
    "channels": ("c", "balanced", "divided"),
    "ragged channels": ("c", "balanced", "ragged"),
    "empty channels": ("c", "balanced", "few"),
    "channels + samples": ("c n", "balanced", "divided"),
    "channels + space": ("c 1", "balanced", "divided"),
    CHANNELS_LAST: ("1", "balanced", ""),
}
"""Axes of the grid, blocks, and size along the first axis, by kind of layout.

The size is empty for the usual one. Axes 1 and 2 are the first and the second spatial axis of the case. ``1/n`` is the
first spatial axis, or n without spatial axes.
"""

RESIZED = frozenset({"one", "least", "ragged", "few"})
"""Sizes in ``KINDS`` that require a case without fixed sizes."""


def layouts(case: Splittable, ranks: int) -> list[CaseLayout]:
    """Return the layouts over some ranks that split dimensions of a case.

    Parameters
    ----------
    case : Splittable
    ranks : int
        Number of ranks.

    Returns
    -------
    list of CaseLayout
    """
    chosen = []
    for name, (written, blocks, resized) in KINDS.items():
        if name not in case.kinds if case.kinds is not None else not case.multiple and resized in RESIZED:
            continue
        axes = [_axis(case, word) for word in written.split()]
        parts = [ranks] if len(axes) == 1 else _factors(ranks)
        if None in axes or parts is None or not (blocks == "whole" or set(axes) <= case.axes | {"r"}):
            continue
        if name == CHANNELS_LAST and len(case.axes.intersection(SPATIAL)) < 2:
            continue
        grid = {axis: n for axis, n in zip(axes, parts, strict=True) if axis is not None}
        changed = _changed(case, resized, *next(iter(grid.items())))
        if changed is not None:
            sizes = _sizes(case, changed)
            chosen.append(CaseLayout(name, tuple(grid.items()), sizes, blocks, channels_last=name == CHANNELS_LAST))
    return chosen


def _axis(case: Splittable, word: str) -> str | None:
    """Return the axis that a word of a kind of layout stands for."""
    number, _, otherwise = word.partition("/")
    if not number.isdigit():
        return number
    space = [axis for axis in SPATIAL if axis in case.axes]
    return space[int(number) - 1] if len(space) >= int(number) else otherwise or None


def _factors(ranks: int) -> list[int] | None:
    """Return two grid sizes above one, if there are any."""
    first = next((n for n in (2, 3, 5, 7) if ranks % n == 0 and ranks > n), None)
    return None if first is None else [first, ranks // first]


def _changed(case: Splittable, resized: str, axis: str, parts: int) -> Extents | None:
    """Return the size along ``axis`` that a kind of layout requires; {} for the usual one, None if no size fits."""
    step = math.lcm(max(1, case.multiple), parts)
    numbers = range(max(1, case.multiple), 8 * parts + 1, max(1, case.multiple))
    extents = {
        "": 0,
        "one": 1,
        "least": case.least.get(axis, 1),
        "divided": step * math.ceil(6 / step),
        # More channels than ranks, which do not divide them.
        "ragged": next((n for n in numbers if n > max(parts, 4) and n % parts), None),
        "few": case.multiple if case.multiple < parts else None,
    }
    extent = extents[resized]
    return None if extent is None else {axis: extent} if extent else {}


def _sizes(case: Splittable, changed: Extents) -> tuple[tuple[str, int], ...]:
    if not case.multiple:
        return ()
    usual_channels = case.multiple * math.ceil(CHANNELS / case.multiple)
    return tuple({**USUAL, "c": usual_channels, **case.sizes, **changed}.items())
