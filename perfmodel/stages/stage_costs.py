"""Cost of a stage: the models of PipeDream, SparsePipe and BaPipe.

A pipeline is as fast as its slowest stage or its slowest boundary between stages: times are seconds per mini-batch in a
full pipeline. The partitioners minimize these costs, and :func:`stage_time` compares any two partitions by one of them.

Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), Eqs. 4-5; Zhao et al. 2020 (BaPipe),
Table I and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.stages.devices import Device, PartitionError, as_devices, check_positive
from distconv.text_files import shorten

Array = npt.NDArray[np.float64]
Counts = tuple[int, ...]
"""Number of devices of each kind."""


@dataclass(frozen=True)
class PartitionCost:
    """Communication and memory as one system counts them.

    Attributes
    ----------
    allreduce_factor : callable
        Bytes that m replicas send per byte of parameters, as a function of m.
    boundary_factor : callable
        Bytes sent per byte of a boundary before a stage of m replicas, as a function of m.
    stashes_weights : bool
        True if weights are kept for every mini-batch in flight (PipeDream's weight stashing). Otherwise once.
    """

    allreduce_factor: Callable[[int], float]
    boundary_factor: Callable[[int], float]
    stashes_weights: bool


COSTS: Mapping[str, PartitionCost] = {
    "pipedream": PartitionCost(lambda m: 4 * (m - 1) / m, lambda m: 2 / m, stashes_weights=True),
    "sparsepipe": PartitionCost(lambda m: 2.0 * (m - 1), lambda m: 1.0, stashes_weights=True),
    "bapipe": PartitionCost(lambda m: 2.0 * (m - 1), lambda m: 1.0, stashes_weights=False),
}
"""Costs by name. BaPipe has no replicas; apart from stashing, its cost is SparsePipe's."""


@dataclass(frozen=True)
class StageRange:
    """Layers and devices of one stage.

    Attributes
    ----------
    first, last : float
        Half-open range of positions, in layers; 2.25 is a quarter into the third layer.
    counts : tuple of int
        Devices of each kind.
    onward : int
        Devices of this stage and of all later ones.
    """

    first: float
    last: float
    counts: Counts
    onward: int


@dataclass(frozen=True)
class StagePartition:
    """Layers and devices of each stage of a network.

    Attributes
    ----------
    method : str
        Method that made the partition.
    cuts : tuple of int
        Split points, as indices into ``Profile.layers``: stage i holds the layers ``cuts[i - 1]`` to ``cuts[i] - 1``.
    positions : tuple of float
        Split points in layers. They differ from ``cuts`` only where BaPipe shares a layer between two stages: 2.25
        assigns a quarter of layer 2 to the earlier stage.
    stages : tuple of tuple of str
        Names of the layers of each stage, split at ``cuts``.
    assignment : tuple of dict
        Number of devices of each name that hold a replica of the stage.
    time : float
        Seconds per mini-batch of ``positions``, by the cost of the method.
    """

    method: str
    cuts: tuple[int, ...]
    positions: tuple[float, ...]
    stages: tuple[tuple[str, ...], ...]
    assignment: tuple[dict[str, int], ...]
    time: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of devices of each stage."""
        return tuple(sum(devices.values()) for devices in self.assignment)

    def __str__(self) -> str:
        where = f"cut at {', '.join(f'{position:g}' for position in self.positions)}" if self.cuts else "no cut"
        return f"{'-'.join(map(str, self.replicas))} ({where}): {self.time:.6g} s"


class PrefixSums:
    """Sums over layers from which costs are computed, for a profile on kinds of devices.

    Methods accept positions or arrays of positions. ``seconds`` (one array for each kind of device), ``parameters`` and
    ``outputs`` (bytes) are prefix sums: entry i is the sum over the first i layers, and there are ``size + 1`` entries.
    ``crossing`` is not a sum: entry i is the number of bytes that cross a split before layer i.

    Parameters
    ----------
    profile : Profile
    devices : int or sequence of Device
    bandwidth : float
        Bytes per second between any two devices.
    cost : PartitionCost

    Raises
    ------
    PartitionError
        If there are no devices, a name occurs twice, a device has times for another number of layers, or the bandwidth
        is not a positive number.
    """

    def __init__(
        self, profile: Profile, devices: int | Sequence[Device], bandwidth: float, cost: PartitionCost
    ) -> None:
        self.profile, self.devices, self.cost = profile, as_devices(devices, len(profile.layers)), cost
        self.bandwidth = check_positive(bandwidth, "bandwidth", "bytes per second")
        self.size = len(profile.layers)
        self.edges: Array = np.arange(self.size + 1.0)
        own = [layer.time_s for layer in profile.layers]
        self.seconds = [_prefix_sums(own if device.times is None else device.times) for device in self.devices]
        self.parameters = _prefix_sums([layer.parameter_bytes for layer in profile.layers])
        self.outputs = _prefix_sums([layer.activation_bytes for layer in profile.layers])
        self.crossing = np.array(profile.crossing_bytes)

    def sum_between(self, sums: Array, first: float | Array, last: float | Array) -> Array:
        """Return the part of a sum over layers between two positions, interpolated within layers.

        Parameters
        ----------
        sums : array
            One of the sums of this object, by position.
        first, last : float or array
            Positions in layers.

        Returns
        -------
        array
        """
        return np.asarray(np.interp(last, self.edges, sums) - np.interp(first, self.edges, sums))

    def stage_time(self, first: float | Array, last: float | Array, counts: Counts) -> Array:
        """Return the seconds of a stage: its slowest device computes, and all replicas all-reduce their gradients.

        Source: Zhai et al. 2020 (SparsePipe), Eq. 4, for the cost "sparsepipe".

        Parameters
        ----------
        first, last : float or array
            Positions of the stage's ends.
        counts : tuple of int
            Devices of each kind.

        Returns
        -------
        array
            Seconds per mini-batch.
        """
        m = sum(counts)
        # Replicas take mini-batches round-robin: m of them finish m mini-batches in the time of the slowest replica.
        kinds = [self.sum_between(self.seconds[kind], first, last) for kind, count in enumerate(counts) if count]
        sent = self.cost.allreduce_factor(m) * self.sum_between(self.parameters, first, last)
        return np.asarray((np.maximum.reduce(kinds) + sent / self.bandwidth) / m)

    def boundary_time(self, position: float | Array, replicas: int) -> Array:
        """Return the seconds in which the bytes that cross a split reach a stage of ``replicas`` devices.

        A shared layer is computed on both sides from its full input. The first stage also sends its part of the output.

        Parameters
        ----------
        position : float or array
            Position of the split, in layers.
        replicas : int
            Devices of the stage after it.

        Returns
        -------
        array
            Seconds per mini-batch.
        """
        # At the end of the network there is no layer to share, and its output is 0.
        layer = np.floor(position).astype(int)
        fraction = np.asarray(position) - layer
        outputs = self.sum_between(self.outputs, layer, np.minimum(layer + 1, self.size))
        crossing = self.crossing[layer] + fraction * outputs
        return np.asarray(self.cost.boundary_factor(replicas) * crossing / self.bandwidth)

    def stage_bytes(self, first: float | Array, last: float | Array, counts: Counts, onward: int) -> Array:
        """Return the bytes on each device of a stage.

        A replica has ceil(onward / replicas) mini-batches in flight, which is BaPipe's N - i + 1 without replicas. For
        each of them it keeps the outputs of its layers, and their weights if they are stashed. Gradients are kept once.

        Parameters
        ----------
        first, last : float or array
            Positions of the stage's ends.
        counts : tuple of int
            Devices of each kind.
        onward : int
            Devices of this stage and of all later ones.

        Returns
        -------
        array
        """
        # Weights (one copy, or one for each mini-batch in flight), and the gradients.
        in_flight = math.ceil(onward / sum(counts))
        weights = (in_flight if self.cost.stashes_weights else 1) + 1
        parameters, outputs = (self.sum_between(sums, first, last) for sums in (self.parameters, self.outputs))
        return in_flight * outputs + weights * parameters

    def memory_limit(self, counts: Counts) -> float:
        """Return the bytes of the smallest device among ``counts``; infinity if no device has a limit."""
        sizes = [device.memory for device, count in zip(self.devices, counts, strict=True) if count]
        return min((size for size in sizes if size is not None), default=math.inf)

    def time(self, stages: Sequence[StageRange]) -> float:
        """Return the seconds of the slowest stage or boundary.

        Source: Zhai et al. 2020 (SparsePipe), Eq. 5.
        """
        works = [float(self.stage_time(stage.first, stage.last, stage.counts)) for stage in stages]
        return max(works + [float(self.boundary_time(stage.first, sum(stage.counts))) for stage in stages[1:]])


def check_profile(where: str, profile: object) -> None:
    """Check that an argument is a Profile.

    Parameters
    ----------
    where : str
        Name of the function in the error message.
    profile : object
        Argument to check.

    Raises
    ------
    PartitionError
        If it is not a Profile.
    """
    if not isinstance(profile, Profile):
        raise PartitionError(f"{where}: found {shorten(repr(profile))}, expected a Profile, such as Profile.load(path)")


def stage_time(
    profile: Profile,
    partition: StagePartition,
    devices: int | Sequence[Device],
    bandwidth: float,
    cost: str = "sparsepipe",
) -> float:
    """Return the time per mini-batch of a partition by one of the costs.

    Use it to compare the partitions of several methods. Only splits between full layers count (``partition.cuts``).

    Source: Zhai et al. 2020 (SparsePipe), Eqs. 4-5; Narayanan et al. 2019 (PipeDream), 3.1.

    Parameters
    ----------
    profile : Profile
        Layers of the network.
    partition : StagePartition
        Partition of the same layers.
    devices : int or sequence of Device
        Devices with the names in ``partition.assignment``.
    bandwidth : float
        Bytes per second between any two devices.
    cost : {"pipedream", "sparsepipe", "bapipe"}
        Entry of ``COSTS``.

    Returns
    -------
    float
        Seconds of the slowest stage or boundary.

    Raises
    ------
    PartitionError
        If an argument is invalid, or the partition has other layers than the profile, or devices that ``devices``
        lacks.
    """
    check_profile("stage_time", profile)
    if not isinstance(partition, StagePartition):
        raise PartitionError(f"stage_time: found {shorten(repr(partition))}, expected what partition() returns")
    if cost not in COSTS:
        raise PartitionError(f"stage_time: cost={cost!r} is not valid. Use one of {', '.join(COSTS)}")
    terms = PrefixSums(profile, devices, bandwidth, COSTS[cost])
    names = [device.name for device in terms.devices]
    layers = sum(len(stage) for stage in partition.stages)
    unknown_names = sorted(
        {name for devices_of_stage in partition.assignment for name in devices_of_stage} - set(names)
    )
    if unknown_names or layers != terms.size:
        raise PartitionError(
            f"stage_time: the partition has {layers} layers on devices {unknown_names or names}, but the profile has "
            f"{terms.size} layers and the devices are {names}"
        )
    counts = [tuple(devices_of_stage.get(name, 0) for name in names) for devices_of_stage in partition.assignment]
    for device, used in zip(terms.devices, map(sum, zip(*counts, strict=True)), strict=True):
        if used > device.count:
            raise PartitionError(
                f"stage_time: the partition has {used} devices {device.name!r}, but there are {device.count}"
            )
    return terms.time(stages_between([0, *partition.cuts, terms.size], counts))


def stages_between(positions: Sequence[float], counts: Sequence[Counts]) -> list[StageRange]:
    """Return the stages between successive positions.

    Parameters
    ----------
    positions : sequence of float
        Split points with both ends.
    counts : sequence of tuple of int
        Devices of each stage.

    Returns
    -------
    list of StageRange
    """
    return [
        StageRange(*ends) for ends in zip(positions[:-1], positions[1:], counts, devices_onward(counts), strict=True)
    ]


def devices_onward(counts: Sequence[Counts]) -> list[int]:
    """Return the number of devices of each group and all later ones.

    Parameters
    ----------
    counts : sequence of tuple of int
        Devices of each kind, for each group.

    Returns
    -------
    list of int

    Examples
    --------
    >>> devices_onward([(2, 0), (0, 1)])
    [3, 1]
    """
    return [sum(map(sum, counts[index:])) for index in range(len(counts))]


def _prefix_sums(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
