"""Cost of the stages of a pipeline for any split points: time of a mini-batch by a closed form, and memory.

Stage i of replica r is on device r N + i, so that a pipeline's stages are neighbours. A part of each stage's gradient
all-reduce is hidden, because no device waits for it: it overlaps with the backward passes of earlier stages, and with
the last one of its own stage if the machine overlaps. :func:`.explore` makes the objects, :mod:`.cuts` searches among
split points.

Positions are split points in layers: 2 lies before the third layer, 2.25 a quarter into it, where two stages share the
layer. Methods accept both, and are faster for integers. A kind of device is an index into ``devices``.

Source: Zhao et al. 2020 (BaPipe), Tables I and II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.stages.closed_forms import SCHEDULES, in_flight, minibatch_time
from distconv.perfmodel.stages.devices import Device, kinds_in_order
from distconv.perfmodel.stages.partition import StagePartition, partition
from distconv.perfmodel.stages.stage_costs import COSTS, Array, PrefixSums
from distconv.plan import Plan

PARALLEL = "dp"
"""Schedule with one stage: data parallelism."""


@dataclass(frozen=True)
class Overheads:
    """Time of a step beyond its layers and links. All are zero by default.

    Attributes
    ----------
    pass_s : float
        Seconds of each forward or backward pass of a stage.
    message_s : float
        Seconds of each message, on both of its sides.
    update_s_per_byte : float
        Seconds of the optimizer per byte of parameters.
    blocking : bool
        True if a message occupies the rank that receives it, which cannot compute meanwhile. Otherwise it overlaps.
    join_s : float
        Seconds to synchronize replicas of the full network, beyond their gradient all-reduce. A stage has the fraction
        of its layers.
    """

    pass_s: float = 0.0
    message_s: float = 0.0
    update_s_per_byte: float = 0.0
    blocking: bool = False
    join_s: float = 0.0

    def __str__(self) -> str:
        updates = f", updates {1e3 * self.update_s_per_byte * 1e6:.3g} ms per MB" if self.update_s_per_byte else ""
        waits = ", a message occupies its receiver" if self.blocking else ""
        joins = f", joining replicas {1e3 * self.join_s:.3g} ms" if self.join_s else ""
        passes = f"a pass {1e6 * self.pass_s:.3g} us, a message {1e6 * self.message_s:.3g} us"
        return f"in addition to layers and links: {passes}{updates}{joins}{waits}"


def round_to_layers(positions: Sequence[float], size: int) -> list[int]:
    """Return split points between layers that are close to some positions. Each stage keeps at least one layer.

    Parameters
    ----------
    positions : sequence of float
        Split points in layers.
    size : int
        Number of layers.

    Returns
    -------
    list of int
    """
    cuts: list[int] = []
    for index, position in enumerate(positions):
        # Room for one layer before this split point, and for one after it and after each later one.
        least, most = (cuts[-1] if cuts else 0) + 1, size - (len(positions) - index)
        cuts.append(min(most, max(least, round(position))))
    return cuts


@dataclass(frozen=True)
class ExplorationContext:
    """A micro-batch's profile on the devices of a machine.

    Attributes
    ----------
    profile : Profile
    machine : Machine
    devices : sequence of Device
        Each with its memory. If ``width`` is above 1, a device stands for that many ranks.
    optimizer_slots : int
        Tensors of optimizer state per parameter.
    width : int
        Ranks of each device.
    plan : Plan or None
        Distribution of the layers over the ranks of a device.
    overheads : Overheads
    estimated : bool
        True if the profile is an estimate on a machine that has measured times of other layers. Otherwise False.
    """

    profile: Profile
    machine: Machine
    devices: Sequence[Device]
    optimizer_slots: int
    width: int = 1
    plan: Plan | None = None
    overheads: Overheads = Overheads()
    estimated: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of all devices."""
        return self.width * sum(device.count for device in self.devices)

    def pipeline_candidate(self, schedule: str, replicas: int, microbatches: int) -> PipelineCandidate | None:
        """Return all devices as replicated pipelines; None if there are more stages than layers.

        Parameters
        ----------
        schedule : str
            As in :func:`.explore`.
        replicas : int
            Number of pipelines, which divides the number of devices.
        microbatches : int
            Micro-batches of the full mini-batch.

        Returns
        -------
        PipelineCandidate or None
        """
        count = sum(device.count for device in self.devices) // replicas
        return (
            None
            if count > len(self.profile.layers)
            else PipelineCandidate(self, schedule, count, replicas, microbatches)
        )

    @cached_property
    def kinds(self) -> list[int]:
        """Kind of each device, as an index into ``devices``."""
        return kinds_in_order(self.devices)

    @cached_property
    def layer_sums(self) -> PrefixSums:
        """Sums over layers, with the bandwidth of the slowest link between neighbours."""
        # Split points are chosen by one bandwidth. Times use the link of each boundary (_transfer_time).
        near = self.ranks <= self.machine.ranks_per_node
        link = self.machine.node if near else self.machine.network
        return PrefixSums(self.profile, self.devices, link.bandwidth_bytes_per_s, COSTS["bapipe"])

    @cached_property
    def forward_fraction(self) -> Array:
        """Forward fraction of each layer's time."""
        return np.array([layer.forward_s / layer.time_s if layer.time_s else 0.5 for layer in self.profile.layers])

    @cached_property
    def forward(self) -> list[Array]:
        """Forward seconds of the layers before each position, for each kind of device."""
        return [
            np.concatenate([[0.0], np.cumsum(np.diff(seconds) * self.forward_fraction)])
            for seconds in self.layer_sums.seconds
        ]

    @cached_property
    def balanced_partition(self) -> StagePartition:
        """BaPipe's partition without a memory limit, which is the same for all schedules."""
        unlimited = [Device(device.name, device.count, device.times) for device in self.devices]
        return partition(self.profile, unlimited, self.layer_sums.bandwidth, "bapipe")


@dataclass(frozen=True)
class PipelineCandidate:
    """Replicated pipelines of ``count`` stages that divide the micro-batches among them.

    Attributes
    ----------
    context : ExplorationContext
    schedule : str
    count : int
        Stages of each pipeline.
    replicas : int
        Number of pipelines.
    microbatches : int
        Micro-batches of the full mini-batch.
    """

    context: ExplorationContext
    schedule: str
    count: int
    replicas: int
    microbatches: int

    @property
    def closed_form(self) -> str:
        """Schedule whose closed form applies.

        Data parallelism has no boundary, so any closed form gives its time. 1F1B keeps one micro-batch in flight.
        """
        return "1f1b-as" if self.schedule == PARALLEL else self.schedule

    @property
    def size(self) -> int:
        """Number of layers."""
        return len(self.context.profile.layers)

    def edges(self, positions: Sequence[float]) -> list[float]:
        """Return the positions with 0 in front and the number of layers at the end."""
        return [0, *positions, self.size]

    # -- time ---------------------------------------------------------------------------------------------------------

    def time(self, positions: Sequence[float]) -> float:
        """Return the seconds of a mini-batch split at ``positions``.

        They are those of the slowest replica, and of the part of the gradient all-reduce that does not overlap.
        """
        slowest = 0.0
        for kinds in self.pipelines:
            forward, backward, transfer = self.costs(positions, kinds)
            update = self.update_times(positions)
            # Endless schedules update after each backward pass; others once, when the pipeline is empty.
            if SCHEDULES[self.closed_form].endless:
                backward, update = [b + u for b, u in zip(backward, update, strict=True)], [0.0]
            microbatches = self.microbatches // self.replicas
            pipelined = minibatch_time(self.closed_form, forward, backward, transfer, microbatches)
            slowest = max(slowest, pipelined + self._exposed_allreduce(positions, backward, transfer) + max(update))
        return slowest

    def update_times(self, positions: Sequence[float]) -> list[float]:
        """Return the seconds of the optimizer and of the synchronization of replicas, for each stage."""
        terms, overheads = self.context.layer_sums, self.context.overheads
        # For each layer, since `join_s` is that of the full network.
        join_s = overheads.join_s / self.size if self.replicas > 1 else 0.0
        return [
            overheads.update_s_per_byte * self._sum_between(terms.parameters, first, last) + join_s * (last - first)
            for first, last in pairwise(self.edges(positions))
        ]

    @cached_property
    def pipelines(self) -> set[tuple[int, ...]]:
        """Kinds of devices of each pipeline, each order once."""
        kinds = self.context.kinds
        return {tuple(kinds[first : first + self.count]) for first in range(0, len(kinds), self.count)}

    def costs(self, positions: Sequence[float], kinds: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Return the seconds of a micro-batch: forward and backward of each stage, and transfers between stages.

        Parameters
        ----------
        positions : sequence of float
            Split points in layers.
        kinds : sequence of int
            Kind of device of each stage.

        Returns
        -------
        tuple of list of float
        """
        spans = list(zip(kinds, pairwise(self.edges(positions)), strict=True))
        forward = [self._sum_between(self.context.forward[kind], first, last) for kind, (first, last) in spans]
        both = [self._sum_between(self.context.layer_sums.seconds[kind], first, last) for kind, (first, last) in spans]
        transfer = [self._transfer_time(index, position) for index, position in enumerate(positions)]
        backward = [b - f for f, b in zip(forward, both, strict=True)]
        return self._with_overheads(forward, backward, transfer)

    def _with_overheads(
        self, forward: list[float], backward: list[float], transfer: list[float]
    ) -> tuple[list[float], list[float], list[float]]:
        overheads = self.context.overheads
        # A blocking message adds to the pass that receives it, so the transfer itself is returned as zero.
        received = transfer if overheads.blocking else [0.0] * len(transfer)
        # A stage exchanges one message in each direction with each of its neighbours.
        neighbours = [(index > 0) + (index < len(transfer)) for index in range(len(forward))]
        fixed = [overheads.pass_s + count * overheads.message_s for count in neighbours]
        forward = [sum(each) for each in zip(forward, fixed, [0.0, *received], strict=True)]
        backward = [sum(each) for each in zip(backward, fixed, [*received, 0.0], strict=True)]
        return forward, backward, [0.0] * len(transfer) if overheads.blocking else transfer

    def _transfer_time(self, index: int, position: float) -> float:
        """Return the seconds between stage ``index`` and the next, for the pipeline in which that is slowest."""
        machine = self.context.machine
        # The first rank of the next stage in each replica: it begins a node if the message crosses nodes.
        ranks = [self.context.width * (replica * self.count + index + 1) for replica in range(self.replicas)]
        across = any(rank % machine.ranks_per_node == 0 for rank in ranks)
        terms = self.context.layer_sums
        if isinstance(position, int):
            return machine.send(float(terms.crossing[position]), across)
        return machine.send(float(terms.boundary_time(position, 1)) * terms.bandwidth, across)

    def _sum_between(self, sums: Array, first: float, last: float) -> float:
        """Return the part of a sum over layers between two positions.

        Between integers no interpolation is needed, which is faster: a search evaluates many of them.
        """
        if isinstance(first, int) and isinstance(last, int):
            return float(sums[last] - sums[first])
        return float(self.context.layer_sums.sum_between(sums, first, last))

    def _exposed_allreduce(
        self, positions: Sequence[float], backward: Sequence[float], transfer: Sequence[float]
    ) -> float:
        """Return the longest time that a stage's all-reduce continues after the last backward pass of the pipeline."""
        if self.replicas == 1:
            return 0.0
        machine, terms = self.context.machine, self.context.layer_sums
        # Replicas of a stage are one pipeline apart, so a node has as many of them as it has full pipelines.
        per_node = machine.ranks_per_node // (self.count * self.context.width)
        group = RankGroup(self.replicas, max(1, min(self.replicas, per_node)))
        # The last backward pass ends on stage 0. Stage i has finished its own before those of all earlier stages.
        earlier, longest = 0.0, 0.0
        for index, (first, last) in enumerate(pairwise(self.edges(positions))):
            overlapped = backward[index] if machine.overlap.allreduce else 0.0
            allreduce = machine.allreduce(group, self._sum_between(terms.parameters, first, last))
            longest = max(longest, allreduce - earlier - overlapped)
            earlier += backward[index] + (transfer[index] if index < len(transfer) else 0.0)
        return longest

    # -- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def weight_copies(self) -> list[int]:
        """Copies of the weights on each stage: weights, gradients, optimizer state, and stashed versions."""
        # Weights and gradients once, and one more copy of the weights for each further mini-batch in flight.
        stashed = SCHEDULES[self.closed_form].stashed
        return [
            2 + self.context.optimizer_slots + (count_in_flight - 1 if stashed else 0)
            for count_in_flight in self.in_flight
        ]

    @cached_property
    def in_flight(self) -> list[int]:
        """Micro-batches in flight on each stage."""
        return in_flight(self.closed_form, self.count, self.microbatches // self.replicas)

    @cached_property
    def memory_limits(self) -> list[float]:
        """Bytes of the smallest device of each stage."""
        kinds = self.context.kinds
        return [
            min(float(self.context.devices[kind].memory or np.inf) for kind in kinds[index :: self.count])
            for index in range(self.count)
        ]

    def memory(self, positions: Sequence[float]) -> tuple[float, ...]:
        """Return the bytes on each device of each stage."""
        outputs, weights = self.context.layer_sums.outputs, self.context.layer_sums.parameters
        return tuple(
            count_in_flight * self._sum_between(outputs, first, last) + copies * self._sum_between(weights, first, last)
            for count_in_flight, copies, (first, last) in zip(
                self.in_flight, self.weight_copies, pairwise(self.edges(positions)), strict=True
            )
        )

    def stage_bytes(self, index: int, first: float | Array, last: float | Array) -> Array:
        """Return the bytes of a stage between two positions.

        Parameters
        ----------
        index : int
            The stage.
        first, last : float or array
            Its ends, in layers.

        Returns
        -------
        Array
        """
        terms = self.context.layer_sums
        outputs, weights = (
            terms.sum_between(terms.outputs, first, last),
            terms.sum_between(terms.parameters, first, last),
        )
        return self.in_flight[index] * outputs + self.weight_copies[index] * weights

    # -- as partitions ------------------------------------------------------------------------------------------------

    def partition(self, positions: Sequence[float]) -> StagePartition:
        """Return the split points as a partition; its ``time`` is that of a mini-batch."""
        names = [layer.name for layer in self.context.profile.layers]
        cuts = round_to_layers(positions, self.size)
        held = []
        for index in range(self.count):
            kinds = [self.context.devices[kind].name for kind in self.context.kinds[index :: self.count]]
            held.append({name: kinds.count(name) for name in dict.fromkeys(kinds)})
        return StagePartition(
            method="explore",
            cuts=tuple(cuts),
            positions=tuple(float(position) for position in positions),
            stages=tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts, self.size])),
            assignment=tuple(held),
            time=self.time(positions),
        )
