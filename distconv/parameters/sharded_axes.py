"""Axes over which weights are sharded. Pure arithmetic, which the planner uses, too."""

from __future__ import annotations

from distconv.arrangement import SLOWEST_FIRST, Arrangement
from distconv.errors import UnsupportedOperation
from distconv.parameters.channel_split import AXIS as CHANNELS


def parse_weight_axes(wanted: str | bool, what: str) -> tuple[str, ...]:
    """Return the axes that ``wanted`` names, with any number of parts.

    Parameters
    ----------
    wanted : str or bool
        Axes as ``"n,h"``; True for all axes except ``c``, over which layers split their channels; False for none.
    what : str
        The setting, with which the error begins.

    Returns
    -------
    tuple of str
        Slowest first.

    Raises
    ------
    UnsupportedOperation
        If an axis is unknown or ``c``.
    """
    known = [axis for axis in SLOWEST_FIRST if axis != CHANNELS]
    if isinstance(wanted, bool):
        return tuple(known) if wanted else ()
    names = [name.strip() for name in wanted.split(",")] if isinstance(wanted, str) else [wanted]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnsupportedOperation(
            f"{what}={wanted!r}: {unknown[0]!r} is not one of the axes {', '.join(known)}; layers shard over c by "
            "themselves"
        )
    return tuple(axis for axis in known if axis in names)


def sharded_axes(grid: Arrangement, wanted: str | bool) -> tuple[str, ...]:
    """Return the axes of a grid over which its weights are to be sharded.

    Parameters
    ----------
    grid : Arrangement
        The grid.
    wanted : str or bool
        As :func:`parse_weight_axes` takes it.

    Returns
    -------
    tuple of str
        Those with several parts, slowest first.

    Raises
    ------
    UnsupportedOperation
        If an axis is unknown or ``c``, or if an axis of several parts lies between the axes.
    """
    what = "shard_weights"
    axes = tuple(axis for axis in parse_weight_axes(wanted, what) if grid.shape[axis] > 1)
    if axes:
        between = SLOWEST_FIRST[SLOWEST_FIRST.index(axes[0]) : SLOWEST_FIRST.index(axes[-1])]
        skipped = [axis for axis in between if axis not in axes and grid.shape[axis] > 1]
        if skipped:
            raise UnsupportedOperation(
                f"{what}={wanted!r} leaves out {skipped[0]!r}, which lies between these axes in the order of the ranks "
                f"of {grid.describe()}. Add it, or take one axis"
            )
    return axes
