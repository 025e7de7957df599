"""What a stage costs: the models of PipeDream, SparsePipe and BaPipe, and the same cost for any two partitions.

A pipeline is as fast as its slowest stage or its slowest boundary between stages: the time returned here is what one
mini-batch takes once the pipeline is full.

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
"""Devices of each kind."""


@dataclass(frozen=True)
class Cost:
    """How a system counts communication and memory.

    ``synchronised(m)`` is the bytes that m replicas are charged per byte of parameters, ``carried(m)`` those per byte
    of a boundary in front of m replicas. ``stashed``: weights are kept for every mini-batch in flight (PipeDream's
    weight stashing), not once.
    """

    synchronised: Callable[[int], float]
    carried: Callable[[int], float]
    stashed: bool


COSTS: Mapping[str, Cost] = {
    "pipedream": Cost(lambda m: 4 * (m - 1) / m, lambda m: 2 / m, stashed=True),
    "sparsepipe": Cost(lambda m: 2.0 * (m - 1), lambda m: 1.0, stashed=True),
    "bapipe": Cost(lambda m: 2.0 * (m - 1), lambda m: 1.0, stashed=False),
}
"""By name. BaPipe has no replicas; beside that its times are SparsePipe's."""


@dataclass(frozen=True)
class StageRange:
    """Layers from position ``first`` up to ``last`` on ``counts`` devices; ``onward`` devices are its own or behind it.

    A position is a number of layers; 2.25 is a quarter into the third one.
    """

    first: float
    last: float
    counts: Counts
    onward: int


@dataclass(frozen=True)
class StagePartition:
    """Where a network is cut and which devices have what.

    Stage i has the layers from ``cuts[i - 1]`` up to but without ``cuts[i]`` (indices into ``Profile.layers``), listed
    in ``stages``; ``assignment[i]`` says how many devices of each name hold a replica of it. ``time`` is in seconds per
    mini-batch, by the method's own cost.

    ``positions`` are the cuts in layers. They differ from ``cuts`` only where BaPipe shares a layer between stages:
    2.25 gives a quarter of layer 2 to the stage before; ``time`` is that of ``positions``.
    """

    method: str
    cuts: tuple[int, ...]
    positions: tuple[float, ...]
    stages: tuple[tuple[str, ...], ...]
    assignment: tuple[dict[str, int], ...]
    time: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Devices of each stage."""
        return tuple(sum(devices.values()) for devices in self.assignment)

    def __str__(self) -> str:
        where = f"cut at {', '.join(f'{position:g}' for position in self.positions)}" if self.cuts else "no cut"
        return f"{'-'.join(map(str, self.replicas))} ({where}): {self.time:.6g} s"


class Terms:
    """The sums that costs are made of, for a profile on kinds of devices. All methods take positions or arrays of them.

    Raises
    ------
    PartitionError
        If there are no devices, a name is there twice, a device has times for another number of layers, or the
        bandwidth is no positive number.
    """

    def __init__(self, profile: Profile, devices: int | Sequence[Device], bandwidth: float, cost: Cost) -> None:
        self.profile, self.devices, self.cost = profile, as_devices(devices, len(profile.layers)), cost
        self.bandwidth = check_positive(bandwidth, "bandwidth", "bytes per second")
        self.size = len(profile.layers)
        self.edges: Array = np.arange(self.size + 1.0)
        own = [layer.time_s for layer in profile.layers]
        self.seconds = [_sums(own if device.times is None else device.times) for device in self.devices]
        self.parameters = _sums([layer.parameter_bytes for layer in profile.layers])
        self.outputs = _sums([layer.activation_bytes for layer in profile.layers])
        self.crossing = np.array(profile.crossing_bytes)

    def between(self, sums: Array, first: float | Array, last: float | Array) -> Array:
        """Part of a sum over layers that is between two positions."""
        return np.asarray(np.interp(last, self.edges, sums) - np.interp(first, self.edges, sums))

    def stage(self, first: float | Array, last: float | Array, counts: Counts) -> Array:
        """Seconds of a stage: the slowest of its devices computes, all synchronise their gradients (Eq. 4)."""
        m = sum(counts)
        # Replicas take turns: m of them finish m mini-batches in the time of the slowest one's.
        kinds = [self.between(self.seconds[kind], first, last) for kind, count in enumerate(counts) if count]
        sent = self.cost.synchronised(m) * self.between(self.parameters, first, last)
        return np.asarray((np.maximum.reduce(kinds) + sent / self.bandwidth) / m)

    def boundary(self, position: float | Array, replicas: int) -> Array:
        """Seconds to carry what crosses a cut to a stage of ``replicas``.

        A layer that is shared is computed on both sides from all of its input, and the first part of its output
        follows.
        """
        whole = np.floor(position).astype(int)
        crossing = self.crossing[whole]
        shared = np.asarray(position) - whole
        crossing = crossing + shared * self.between(self.outputs, whole, np.minimum(whole + 1, self.size))
        return np.asarray(self.cost.carried(replicas) * crossing / self.bandwidth)

    def memory(self, first: float | Array, last: float | Array, counts: Counts, onward: int) -> Array:
        """Bytes on each device of a stage.

        A replica has ceil(onward / replicas) mini-batches in flight: BaPipe's N - i + 1 for one replica each. For each
        it keeps the outputs of its layers, and their weights too where they are stashed; gradients once.
        """
        flying = math.ceil(onward / sum(counts))
        weights = (flying if self.cost.stashed else 1) + 1
        parameters, outputs = (self.between(sums, first, last) for sums in (self.parameters, self.outputs))
        return flying * outputs + weights * parameters

    def room(self, counts: Counts) -> float:
        """Bytes of the smallest device among them."""
        sizes = [device.memory for device, count in zip(self.devices, counts, strict=True) if count]
        return min((size for size in sizes if size is not None), default=math.inf)

    def time(self, stages: Sequence[StageRange]) -> float:
        """Seconds of the slowest stage or boundary (Eq. 5)."""
        works = [float(self.stage(stage.first, stage.last, stage.counts)) for stage in stages]
        return max(works + [float(self.boundary(stage.first, sum(stage.counts))) for stage in stages[1:]])


def check_profile(where: str, profile: object) -> None:
    """Raise PartitionError if it is none.

    Raises
    ------
    PartitionError
        If it is no Profile.
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
    """Seconds per mini-batch of a partition of whole layers (its ``cuts``) by the cost of ``COSTS`` that is named.

    Raises
    ------
    PartitionError
        If the partition has devices that ``devices`` lacks or more than there are of a kind, or another number of
        layers than the profile.
    """
    check_profile("stage_time", profile)
    if not isinstance(partition, StagePartition):
        raise PartitionError(f"stage_time: found {shorten(repr(partition))}, expected what partition() returns")
    if cost not in COSTS:
        raise PartitionError(f"stage_time: there is no cost {cost!r}; there are {', '.join(COSTS)}")
    terms = Terms(profile, devices, bandwidth, COSTS[cost])
    names = [device.name for device in terms.devices]
    layers = sum(len(stage) for stage in partition.stages)
    strange = sorted({name for held in partition.assignment for name in held} - set(names))
    if strange or layers != terms.size:
        raise PartitionError(
            f"stage_time: the partition has {layers} layers and devices {strange or names}, "
            f"the profile {terms.size} layers and there are devices {names}"
        )
    counts = [tuple(held.get(name, 0) for name in names) for held in partition.assignment]
    for device, used in zip(terms.devices, map(sum, zip(*counts, strict=True)), strict=True):
        if used > device.count:
            raise PartitionError(
                f"stage_time: the partition has {used} devices {device.name!r}, but there are {device.count}"
            )
    return terms.time(staged([0, *partition.cuts, terms.size], counts))


def staged(positions: Sequence[float], counts: Sequence[Counts]) -> list[StageRange]:
    """Stages between successive positions."""
    return [StageRange(*ends) for ends in zip(positions[:-1], positions[1:], counts, onward(counts), strict=True)]


def onward(counts: Sequence[Counts]) -> list[int]:
    """Devices of each group and all behind it.

    >>> onward([(2, 0), (0, 1)])
    [3, 1]
    """
    return [sum(map(sum, counts[index:])) for index in range(len(counts))]


def _sums(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
