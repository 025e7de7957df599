"""What stages of a pipeline cost for any cuts: time of a mini-batch by a schedule's closed form, and memory.

Stage i of replica r is on device r N + i, so that a pipeline's stages are neighbours. ``hidden``: what of a stage's
allreduce no device waits for: the backward passes of the stages before it, and its own last one where the machine
overlaps.

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
from distconv.perfmodel.stages.stage_costs import COSTS, Array, Terms
from distconv.plan import Plan

PARALLEL = "dp"
"""One stage: data parallelism."""


@dataclass(frozen=True)
class Overheads:
    """What a step takes beside its layers and links, in seconds: nothing, unless told otherwise.

    ``pass_s``: of each forward or backward pass of a stage. ``message_s``: of each message, on both of its sides.
    ``update_s_per_byte``: of the optimizer, for each byte of parameters. ``blocking``: a message occupies the rank that
    takes it, which cannot compute meanwhile. ``join_s``: of bringing replicas of the whole network together, beside the
    sums of their gradients; a stage has the share of its layers.
    """

    pass_s: float = 0.0
    message_s: float = 0.0
    update_s_per_byte: float = 0.0
    blocking: bool = False
    join_s: float = 0.0

    def __str__(self) -> str:
        updates = f", updates {1e3 * self.update_s_per_byte * 1e6:.3g} ms per MB" if self.update_s_per_byte else ""
        waits = ", messages occupy who takes them" if self.blocking else ""
        joins = f", joining replicas {1e3 * self.join_s:.3g} ms" if self.join_s else ""
        passes = f"a pass {1e6 * self.pass_s:.3g} us, a message {1e6 * self.message_s:.3g} us"
        return f"beside layers and links: {passes}{updates}{joins}{waits}"


def whole(positions: Sequence[float], size: int) -> list[int]:
    """Cuts between whole layers at or beside ``positions``: each stage keeps at least one of ``size`` layers."""
    cuts: list[int] = []
    for index, position in enumerate(positions):
        least, most = (cuts[-1] if cuts else 0) + 1, size - (len(positions) - index)
        cuts.append(min(most, max(least, round(position))))
    return cuts


@dataclass(frozen=True)
class ExplorationContext:
    """A micro-batch's ``profile`` on ``devices`` of a machine, each with its memory.

    With a ``width`` above 1 what is called a device is so many ranks, among which ``plan`` distributes the layers.
    ``estimated``: the profile is an estimate on a machine that has measured times of other layers.
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
        """Of all devices."""
        return self.width * sum(device.count for device in self.devices)

    def stages(self, schedule: str, replicas: int, microbatches: int) -> Stages | None:
        """All devices as ``replicas`` pipelines; None if there are more stages than layers."""
        count = sum(device.count for device in self.devices) // replicas
        return None if count > len(self.profile.layers) else Stages(self, schedule, count, replicas, microbatches)

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each device."""
        return kinds_in_order(self.devices)

    @cached_property
    def terms(self) -> Terms:
        """Sums over layers; its bandwidth is that of the slowest link between neighbours."""
        near = self.ranks <= self.machine.ranks_per_node
        link = self.machine.node if near else self.machine.network
        return Terms(self.profile, self.devices, link.bandwidth_bytes_per_s, COSTS["bapipe"])

    @cached_property
    def forward_share(self) -> Array:
        """The share of each layer's time that is forward."""
        return np.array([layer.forward_s / layer.time_s if layer.time_s else 0.5 for layer in self.profile.layers])

    @cached_property
    def forward(self) -> list[Array]:
        """Seconds forward of the layers before each position, for each kind of device."""
        return [
            np.concatenate([[0.0], np.cumsum(np.diff(seconds) * self.forward_share)]) for seconds in self.terms.seconds
        ]

    @cached_property
    def balanced(self) -> StagePartition:
        """BaPipe's partition without a limit of memory, which is the same for all schedules."""
        unlimited = [Device(device.name, device.count, device.times) for device in self.devices]
        return partition(self.profile, unlimited, self.terms.bandwidth, "bapipe")


@dataclass(frozen=True)
class Stages:
    """``replicas`` pipelines of ``count`` stages that share ``microbatches`` micro-batches."""

    setting: ExplorationContext
    schedule: str
    count: int
    replicas: int
    microbatches: int

    @property
    def form(self) -> str:
        """The schedule whose closed form applies; without a boundary all of them are the same."""
        return "1f1b-as" if self.schedule == PARALLEL else self.schedule

    @property
    def size(self) -> int:
        """Layers."""
        return len(self.setting.profile.layers)

    def edges(self, positions: Sequence[float]) -> list[float]:
        """The positions with both ends."""
        return [0, *positions, self.size]

    # -- time ---------------------------------------------------------------------------------------------------------

    def time(self, positions: Sequence[float]) -> float:
        """Seconds of a mini-batch cut at ``positions``: the slowest of the replicas, and the allreduce behind it."""
        slowest = 0.0
        for kinds in self.pipelines:
            forward, backward, transfer = self.costs(positions, kinds)
            update = self.updates(positions)
            if SCHEDULES[self.form].endless:
                backward, update = [b + u for b, u in zip(backward, update, strict=True)], [0.0]
            share = self.microbatches // self.replicas
            piped = minibatch_time(self.form, forward, backward, transfer, share)
            slowest = max(slowest, piped + self._exposed(positions, backward, transfer) + max(update))
        return slowest

    def updates(self, positions: Sequence[float]) -> list[float]:
        """Seconds of the optimizer on each stage, and of bringing its replicas together."""
        terms, of = self.setting.terms, self.setting.overheads
        join_s = of.join_s / self.size if self.replicas > 1 else 0.0
        return [
            of.update_s_per_byte * self._between(terms.parameters, first, last) + join_s * (last - first)
            for first, last in pairwise(self.edges(positions))
        ]

    @cached_property
    def pipelines(self) -> set[tuple[int, ...]]:
        """The kinds of devices of each pipeline, each order once."""
        kinds = self.setting.kinds
        return {tuple(kinds[first : first + self.count]) for first in range(0, len(kinds), self.count)}

    def costs(self, positions: Sequence[float], kinds: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Seconds of a micro-batch forward and backward on each stage and between stages, on devices of ``kinds``."""
        spans = list(zip(kinds, pairwise(self.edges(positions)), strict=True))
        forward = [self._between(self.setting.forward[kind], first, last) for kind, (first, last) in spans]
        both = [self._between(self.setting.terms.seconds[kind], first, last) for kind, (first, last) in spans]
        transfer = [self._transfer(index, position) for index, position in enumerate(positions)]
        backward = [b - f for f, b in zip(forward, both, strict=True)]
        return self._with_overheads(forward, backward, transfer)

    def _with_overheads(
        self, forward: list[float], backward: list[float], transfer: list[float]
    ) -> tuple[list[float], list[float], list[float]]:
        of = self.setting.overheads
        taken = transfer if of.blocking else [0.0] * len(transfer)
        # A stage between others takes and gives one message in each direction.
        neighbours = [(index > 0) + (index < len(transfer)) for index in range(len(forward))]
        fixed = [of.pass_s + count * of.message_s for count in neighbours]
        forward = [f + more + into for f, more, into in zip(forward, fixed, [0.0, *taken], strict=True)]
        backward = [b + more + into for b, more, into in zip(backward, fixed, [*taken, 0.0], strict=True)]
        return forward, backward, [0.0] * len(transfer) if of.blocking else transfer

    def _transfer(self, index: int, position: float) -> float:
        """Seconds between stages ``index`` and the next, of the pipeline where that is slowest."""
        machine = self.setting.machine
        ranks = [self.setting.width * (replica * self.count + index + 1) for replica in range(self.replicas)]
        across = any(rank % machine.ranks_per_node == 0 for rank in ranks)
        terms = self.setting.terms
        if isinstance(position, int):
            return machine.send(float(terms.crossing[position]), across)
        return machine.send(float(terms.boundary(position, 1)) * terms.bandwidth, across)

    def _between(self, sums: Array, first: float, last: float) -> float:
        """Part of a sum over layers; between whole ones, of which a search asks for many, without interpolation."""
        if isinstance(first, int) and isinstance(last, int):
            return float(sums[last] - sums[first])
        return float(self.setting.terms.between(sums, first, last))

    def _exposed(self, positions: Sequence[float], backward: Sequence[float], transfer: Sequence[float]) -> float:
        if self.replicas == 1:
            return 0.0
        machine, terms = self.setting.machine, self.setting.terms
        per_node = machine.ranks_per_node // (self.count * self.setting.width)
        group = RankGroup(self.replicas, max(1, min(self.replicas, per_node)))
        before, longest = 0.0, 0.0
        for index, (first, last) in enumerate(pairwise(self.edges(positions))):
            own = backward[index] if machine.overlap.allreduce else 0.0
            summed = machine.allreduce(group, self._between(terms.parameters, first, last))
            longest = max(longest, summed - before - own)
            before += backward[index] + (transfer[index] if index < len(transfer) else 0.0)
        return longest

    # -- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def weight_copies(self) -> list[int]:
        """Weights, gradients and what the optimizer keeps on each stage, and versions that are stashed."""
        stashed = SCHEDULES[self.form].stashed
        return [2 + self.setting.optimizer_slots + (flying - 1 if stashed else 0) for flying in self.flying]

    @cached_property
    def flying(self) -> list[int]:
        """Micro-batches in flight on each stage."""
        return in_flight(self.form, self.count, self.microbatches // self.replicas)

    @cached_property
    def rooms(self) -> list[float]:
        """Bytes of the smallest device of each stage."""
        kinds = self.setting.kinds
        return [
            min(float(self.setting.devices[kind].memory or np.inf) for kind in kinds[index :: self.count])
            for index in range(self.count)
        ]

    def memory(self, positions: Sequence[float]) -> tuple[float, ...]:
        """Bytes on each device of each stage."""
        outputs, weights = self.setting.terms.outputs, self.setting.terms.parameters
        return tuple(
            flying * self._between(outputs, first, last) + copies * self._between(weights, first, last)
            for flying, copies, (first, last) in zip(
                self.flying, self.weight_copies, pairwise(self.edges(positions)), strict=True
            )
        )

    def needed(self, index: int, first: float | Array, last: float | Array) -> Array:
        """Bytes of stage ``index`` between two positions."""
        terms = self.setting.terms
        outputs, weights = terms.between(terms.outputs, first, last), terms.between(terms.parameters, first, last)
        return self.flying[index] * outputs + self.weight_copies[index] * weights

    # -- as partitions ------------------------------------------------------------------------------------------------

    def partition(self, positions: Sequence[float]) -> StagePartition:
        """The cuts as a partition; its ``time`` is that of a mini-batch."""
        names = [layer.name for layer in self.setting.profile.layers]
        cuts = whole(positions, self.size)
        held = []
        for index in range(self.count):
            kinds = [self.setting.devices[kind].name for kind in self.setting.kinds[index :: self.count]]
            held.append({name: kinds.count(name) for name in dict.fromkeys(kinds)})
        return StagePartition(
            method="explore",
            cuts=tuple(cuts),
            positions=tuple(float(position) for position in positions),
            stages=tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts, self.size])),
            assignment=tuple(held),
            time=self.time(positions),
        )
