"""Time and memory of a training step of a sparse network whose sites are split over a grid.

The grid's boxes are cut at quantiles of the example's sites, as :func:`distconv.layers.sparse.scatter` cuts them. What
each rank has then is counted, not estimated: its sites and pairs at every layer, and the sites that it sends to others.

Source: Zhai et al., "SparsePipe", eq. 3 (a pair is a row times a matrix); Dryden et al. 2019, V-A (halos, allreduces).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from distconv.arrangement import Arrangement
from distconv.layers.sparse import Partition
from distconv.layers.sparse.coordinate_manager import Sites
from distconv.layers.sparse.site_halo import sent_rows
from distconv.perfmodel.machine.links import Group
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.sparse.recording import Recording, SiteOperation, Window

INDEX_BYTES = 8
"""Of a coordinate, a key, or a row in a kernel map."""

SEARCH_PASSES = 12
"""Building a map reads so many indices per site and offset: the search, the comparison, what is found."""

LAYER_PASSES = {"batch_norm": (3, 4), "pointwise": (2, 3), "global_pool": (1, 1)}
"""How often forward and backward go over the features of what only touches memory."""


@dataclass(frozen=True, kw_only=True)
class SitePrediction:
    """Seconds of a training step, and bytes on the fullest rank.

    ``compute`` is the busiest rank's at each layer, ``maps`` the search for pairs, ``halo`` the features of others'
    sites, ``sync`` what batch norm and pooling over all sites wait for, ``allreduce`` that of gradients. ``pairs`` is
    the share of all pairs that the busiest rank has, 1 / ranks at best.
    """

    grid: Arrangement
    compute: float
    maps: float
    halo: float
    sync: float
    allreduce: float
    memory: float
    pairs: float

    @property
    def time(self) -> float:
        """Of the step: nothing is hidden."""
        return self.compute + self.maps + self.halo + self.sync + self.allreduce


def predict(recording: Recording, machine: Machine, grid: Arrangement, *, optimizer_slots: int = 1) -> SitePrediction:
    """A training step of the recorded network with its sites split over ``grid``.

    Raises
    ------
    DistributionError
        If an axis of the grid cuts nothing in the example's dimensions.
    """
    costs = _Costs(recording, machine, Partition.balanced(grid, recording.sites.coords))
    operations = recording.operations
    parameters = recording.itemsize * sum(op.parameters for op in operations)
    update = costs.roofline(0, (3 + 2 * optimizer_slots) * parameters)
    total = sum(op.window.pairs.active_pairs for op in operations if op.window)
    busiest = sum(costs.most_pairs(op.window, op.outputs) for op in operations if op.window)
    return SitePrediction(
        grid=grid,
        compute=sum(costs.compute(op) for op in operations) + update,
        maps=sum(costs.map_time(op) for op in costs.first_of_maps()),
        halo=sum(costs.halo(op) for op in operations if op.window),
        sync=sum(costs.sync(op) for op in operations),
        allreduce=sum(costs.allreduce(recording.itemsize * op.parameters) for op in operations),
        memory=costs.memory() + (2 + optimizer_slots) * parameters,
        pairs=busiest / total if total else 0.0,
    )


class _Costs:
    """Costs of operations over one partition; whatever depends on sites alone is counted once."""

    def __init__(self, recording: Recording, machine: Machine, partition: Partition[Arrangement]) -> None:
        self.recording, self.machine, self.partition = recording, machine, partition
        self.ranks = partition.grid.size
        self.group = Group(self.ranks, min(self.ranks, machine.ranks_per_node))
        self._here = machine.computing(self.group.per_node).roofline
        self._known: dict[Hashable, torch.Tensor] = {}

    # -- counts -------------------------------------------------------------------------------------------------------

    def owners(self, sites: Sites) -> torch.Tensor:
        """The rank of each site, (N,)."""
        return self._once(("owners", sites), lambda: self.partition.owners(sites.coords))

    def most_sites(self, sites: Sites) -> int:
        """Of one rank."""
        return int(torch.bincount(self.owners(sites), minlength=1).max())

    def most_pairs(self, window: Window, outputs: Sites) -> int:
        """Of one rank: a pair is computed where its output site is."""

        def count() -> torch.Tensor:
            owners = self.owners(outputs)
            found = [torch.bincount(owners[rows], minlength=self.ranks) for _, rows in window.pairs.pairs]
            return torch.stack(found).sum(0)

        return int(self._once(("pairs", window.key), count).max())

    def halo_rows(self, op: SiteOperation) -> torch.Tensor:
        """Sites that each rank sends to each other one, (ranks, ranks); -1 between those whose boxes are too far."""
        window = op.window
        assert window is not None
        return self._once(("halo", op.inputs, window.low, window.high), lambda: self._sent(op.inputs, window))

    def _sent(self, sites: Sites, window: Window) -> torch.Tensor:
        found = torch.full((self.ranks, self.ranks), -1)
        owners = self.owners(sites)
        for rank in range(self.ranks):
            sent = sent_rows(self.partition, rank, sites.coords[owners == rank], window.low, window.high)
            for peer, rows in sent.items():
                found[rank, peer] = len(rows)
        return found

    def _once(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def first_of_maps(self) -> Iterable[SiteOperation]:
        """The operations that build a map; others find it."""
        first: dict[Hashable, SiteOperation] = {}
        for op in self.recording.operations:
            if op.window is not None:
                first.setdefault(op.window.key, op)
        return first.values()

    # -- times --------------------------------------------------------------------------------------------------------

    def roofline(self, flops: float, nbytes: float, kernels: int = 1) -> float:
        """Seconds of ``kernels`` kernels that do this together."""
        return self._here.time(flops, nbytes, math.inf) + (kernels - 1) * self._here.kernel_s

    def compute(self, op: SiteOperation) -> float:
        """Forward and backward on the busiest rank."""
        if op.window is not None:
            return self._window(op, op.window)
        if op.kind in ("linear", "head"):
            rows = op.samples if op.kind == "head" else self.most_sites(op.inputs)
            flops = 2.0 * rows * op.channels * op.filters
            moved = self.recording.itemsize * (rows * (op.channels + op.filters) + op.channels * op.filters)
            return (3 if op.input_gradient else 2) * self.roofline(flops, moved)
        size = self.most_sites(op.inputs) * max(op.channels, op.filters) * self.recording.itemsize
        forward, backward = LAYER_PASSES[op.kind]
        return self.roofline(0, forward * size) + (self.roofline(0, backward * size) if op.input_gradient else 0.0)

    def _window(self, op: SiteOperation, window: Window) -> float:
        """Gather rows, multiply each offset's, add them up: each a kernel for each offset, in three passes.

        Forward: x to y; backward: dy to dx, and x and dy to dw, for which dy is gathered already. Where sites meet
        themselves nothing is gathered.
        """
        size, pairs = self.recording.itemsize, self.most_pairs(window, op.outputs)
        itself = self.most_sites(op.outputs) if window.pairs.identity is not None else 0
        offsets = sum(1 for rows, _ in window.pairs.pairs if len(rows))
        moved = pairs - itself

        def gather(channels: int) -> float:
            return self.roofline(0, moved * (2 * channels * size + INDEX_BYTES), offsets)

        def add(channels: int) -> float:
            return self.roofline(
                0, (moved * (3 * channels * size + INDEX_BYTES)) + 3 * itself * channels * size, offsets
            )

        if op.kind == "pooling":
            return 2 * (gather(op.channels) + add(op.filters))
        multiply = self.roofline(
            2.0 * pairs * op.channels * op.filters, pairs * (op.channels + op.filters) * size, offsets
        )
        forward = gather(op.channels) + multiply + add(op.filters)
        weights = gather(op.filters) + gather(op.channels) + multiply
        return forward + weights + (multiply + add(op.channels) if op.input_gradient else 0.0)

    def map_time(self, op: SiteOperation) -> float:
        """Building the map of a layer, and asking for the sites of its halo."""
        assert op.window is not None
        offsets = len(op.window.pairs.pairs)
        searched = -(-offsets // 2) if op.window.pairs.identity is not None else offsets
        queries = searched * self.most_sites(op.outputs)
        coordinates = INDEX_BYTES * (1 + self.recording.dimension)
        asked = 2 * self._exchange(op, 0) + self._exchange(op, coordinates) if self.ranks > 1 else 0.0
        return self.roofline(0, SEARCH_PASSES * INDEX_BYTES * queries, 6 * searched) + asked

    def halo(self, op: SiteOperation) -> float:
        """Features of other ranks' sites, and their gradients back."""
        if self.ranks == 1:
            return 0.0
        return (2 if op.input_gradient else 1) * self._exchange(op, op.channels * self.recording.itemsize)

    def _exchange(self, op: SiteOperation, row_bytes: int) -> float:
        """Seconds until the busiest rank has sent, and packed, its rows for all others."""
        rows = self.halo_rows(op)
        nodes = torch.arange(self.ranks) // self.machine.ranks_per_node
        far, sent = nodes[:, None] != nodes[None], rows.clamp(min=0) * row_bytes
        total = torch.zeros(self.ranks, dtype=torch.float64)
        for link, where in ((self.machine.network, far), (self.machine.node, ~far)):
            messages = ((rows >= 0) & where).sum(1)
            total += messages * link.latency_s + (sent * where).sum(1) / link.bandwidth_bytes_per_s
        busiest = int(total.argmax())
        if not bool((rows[busiest] >= 0).any()):
            return 0.0
        return float(total[busiest]) + self.roofline(0, 4 * float(sent[busiest].sum()), 2) + self._here.exchange_s

    def sync(self, op: SiteOperation) -> float:
        """Sums over all ranks that a layer waits for, forward and backward."""
        if op.kind == "batch_norm":
            return 2 * self.allreduce(2 * 4.0 * op.channels)
        return self.allreduce(op.samples * op.channels * self.recording.itemsize) if op.kind == "global_pool" else 0.0

    def allreduce(self, nbytes: float) -> float:
        """Over all ranks."""
        return self.machine.allreduce(self.group, nbytes) if nbytes and self.ranks > 1 else 0.0

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> float:
        """Features that autograd keeps, and kernel maps, in bytes on the rank that has most at each layer."""
        total = 0.0
        for op in self.recording.operations:
            if op.kind != "head":
                total += self.most_sites(op.outputs) * op.filters * self.recording.itemsize
            if op.window is not None and self.ranks > 1:
                received = self.halo_rows(op).clamp(min=0).sum(0).max()
                total += (self.most_sites(op.inputs) + int(received)) * op.channels * self.recording.itemsize
        for op in self.first_of_maps():
            assert op.window is not None
            shared = 2 if op.window.pairs.identity is not None else 1
            total += 2 * INDEX_BYTES * self.most_pairs(op.window, op.outputs) / shared
        return total
