"""Memory of stages on their devices, and the error if no partition fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distconv.perfmodel.stages.devices import PartitionError
from distconv.perfmodel.stages.dynamic_program import Move, cheapest
from distconv.perfmodel.stages.stage_costs import Array, StageRange, Terms


def fitting(terms: Terms, move: Move, first: float | Array, last: float | Array) -> npt.NDArray[np.bool_]:
    """Return True, for each pair of positions, if the stage between them fits each of its devices.

    Parameters
    ----------
    terms : Terms
    move : Move
        Devices of the stage.
    first, last : float or array
        Positions of the stage's ends.

    Returns
    -------
    array of bool
    """
    room = terms.room(move.counts)
    return np.asarray(terms.memory(first, last, move.counts, move.onward) <= room)


def excess(terms: Terms, stages: Sequence[StageRange]) -> float:
    """Return the bytes by which stages exceed the memory of their devices, summed over the stages.

    Parameters
    ----------
    terms : Terms
    stages : sequence of StageRange

    Returns
    -------
    float
    """
    return sum(max(0.0, _needed(terms, stage) - terms.room(stage.counts)) for stage in stages)


def least_memory(terms: Terms, moves: Sequence[Move]) -> list[StageRange] | None:
    """Return the stages that fill their devices least.

    Parameters
    ----------
    terms : Terms
    moves : sequence of Move
        Allowed groups of devices.

    Returns
    -------
    list of StageRange or None
        None if there are fewer layers than the stages that ``moves`` require.
    """

    def work(move: Move) -> Array:
        needed = terms.memory(terms.edges[:, None], terms.edges[None, :], move.counts, move.onward)
        return np.asarray(needed / terms.room(move.counts))

    return cheapest(terms.size, moves, work, lambda move: np.zeros(terms.size + 1))


def does_not_fit(terms: Terms, moves: Sequence[Move]) -> PartitionError:
    """Return the error that no partition fits.

    It names the fullest stage of the partition that needs least, and the memory that this stage needs.

    Parameters
    ----------
    terms : Terms
    moves : sequence of Move
        Allowed groups of devices.

    Returns
    -------
    PartitionError
        To be raised by the caller.
    """
    stages = least_memory(terms, moves)
    assert stages is not None
    fullest = max(stages, key=lambda stage: _needed(terms, stage) / terms.room(stage.counts))
    needed, room = math.ceil(_needed(terms, fullest)), terms.room(fullest.counts)
    held = [device for device, count in zip(terms.devices, fullest.counts, strict=True) if count]
    smallest = next(device for device in held if device.memory == room)
    names = [layer.name for layer in terms.profile.layers[int(fullest.first) : int(fullest.last)]]
    # Rounded up to three decimals: a factor that is rounded down would not be enough.
    times = (math.floor(1000 * needed / room) + 1) / 1000
    others = f" (and the others {times:.3f} times theirs)" if len(terms.devices) > 1 else ""
    return PartitionError(
        f"partition: no partition fits the memory: in the one that needs least, stage {stages.index(fullest) + 1} of "
        f"{len(stages)} (layers {names[0]!r} to {names[-1]!r}) needs {needed} bytes on device {smallest.name!r}, "
        f"which has {room:.0f}; the smallest memory that works is {needed} bytes{others}"
    )


def _needed(terms: Terms, stage: StageRange) -> float:
    return float(terms.memory(stage.first, stage.last, stage.counts, stage.onward))
