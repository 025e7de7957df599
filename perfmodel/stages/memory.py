"""Memory of stages on their devices, and the error if no partition fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distconv.perfmodel.stages.devices import PartitionError
from distconv.perfmodel.stages.dynamic_program import StageMove, cheapest_stages
from distconv.perfmodel.stages.stage_costs import Array, PrefixSums, StageRange


def fits_devices(
    terms: PrefixSums, move: StageMove, first: float | Array, last: float | Array
) -> npt.NDArray[np.bool_]:
    """Return True, for each pair of positions, if the stage between them fits each of its devices.

    Parameters
    ----------
    terms : PrefixSums
    move : StageMove
        Devices of the stage.
    first, last : float or array
        Positions of the stage's ends.

    Returns
    -------
    array of bool
    """
    limit = terms.memory_limit(move.counts)
    return np.asarray(terms.stage_bytes(first, last, move.counts, move.onward) <= limit)


def excess_bytes(terms: PrefixSums, stages: Sequence[StageRange]) -> float:
    """Return the bytes by which stages exceed the memory of their devices, summed over the stages.

    Parameters
    ----------
    terms : PrefixSums
    stages : sequence of StageRange

    Returns
    -------
    float
    """
    return sum(max(0.0, _needed_bytes(terms, stage) - terms.memory_limit(stage.counts)) for stage in stages)


def least_memory(terms: PrefixSums, moves: Sequence[StageMove]) -> list[StageRange] | None:
    """Return the stages with the least memory, as a fraction of their devices' memory, on the stage with the most.

    Parameters
    ----------
    terms : PrefixSums
    moves : sequence of StageMove
        Allowed groups of devices.

    Returns
    -------
    list of StageRange or None
        None if there are fewer layers than the stages that ``moves`` require.
    """

    def work(move: StageMove) -> Array:
        needed = terms.stage_bytes(terms.edges[:, None], terms.edges[None, :], move.counts, move.onward)
        return np.asarray(needed / terms.memory_limit(move.counts))

    return cheapest_stages(terms.size, moves, work, lambda move: np.zeros(terms.size + 1))


def no_fit_error(terms: PrefixSums, moves: Sequence[StageMove]) -> PartitionError:
    """Return the error that no partition fits.

    It names the stage that fills its devices most, of the partition in which that stage needs least.

    Parameters
    ----------
    terms : PrefixSums
    moves : sequence of StageMove
        Allowed groups of devices.

    Returns
    -------
    PartitionError
        To be raised by the caller.
    """
    stages = least_memory(terms, moves)
    assert stages is not None
    tightest = max(stages, key=lambda stage: _needed_bytes(terms, stage) / terms.memory_limit(stage.counts))
    needed, limit = math.ceil(_needed_bytes(terms, tightest)), terms.memory_limit(tightest.counts)
    held = [device for device, count in zip(terms.devices, tightest.counts, strict=True) if count]
    # The limit is that of the smallest device, so one of them has it.
    smallest = next(device for device in held if device.memory == limit)
    names = [layer.name for layer in terms.profile.layers[int(tightest.first) : int(tightest.last)]]
    # Rounded up to three decimals: a factor that is rounded down would not be enough.
    times = (math.floor(1000 * needed / limit) + 1) / 1000
    others = f" (and the others {times:.3f} times theirs)" if len(terms.devices) > 1 else ""
    return PartitionError(
        f"partition: no partition fits the memory: in the one that needs least, stage {stages.index(tightest) + 1} of "
        f"{len(stages)} (layers {names[0]!r} to {names[-1]!r}) needs {needed} bytes on device {smallest.name!r}, "
        f"which has {limit:.0f}; the smallest memory that works is {needed} bytes{others}"
    )


def _needed_bytes(terms: PrefixSums, stage: StageRange) -> float:
    return float(terms.stage_bytes(stage.first, stage.last, stage.counts, stage.onward))
