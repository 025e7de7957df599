"""Times and memory of operations, and of a training step, whose sites are split over a grid.

The boundaries of the grid's boxes are quantiles of the example's sites, as in :func:`distconv.layers.sparse.scatter`.
Each rank's sites, pairs and sent sites are then counted at every layer, not estimated.

Source: Zhai et al. 2020 (SparsePipe), eq. 3 (a pair is a row times a matrix); Dryden et al. 2019, V-A (halos,
all-reduces).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from distconv.arrangement import Arrangement
from distconv.layers.sparse import Partition
from distconv.layers.sparse.coordinate_manager import Sites
from distconv.layers.sparse.site_halo import rows_by_peer
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.sparse.recording import SiteOperation, SiteWindow, SparseRecording

INDEX_BYTES = 8
"""Bytes of a coordinate, a key, or a row index in a kernel map."""

SEARCH_PASSES = 12
"""Indices read per site and offset when a map is built: search, comparison and result."""

LAYER_PASSES = {"batch_norm": (3, 4), "pointwise": (2, 3), "global_pool": (1, 1)}
"""Passes of forward and backward over the features, for operations that are limited by memory traffic."""


class SiteCosts:
    """Costs of operations over a grid. Counts that depend on sites alone are computed once.

    Parameters
    ----------
    recording : SparseRecording
    machine : Machine
    grid : Arrangement
        Parts along n and the spatial axes.

    Raises
    ------
    DistributionError
        If an axis of the grid does not exist in the example's dimensions.
    """

    def __init__(self, recording: SparseRecording, machine: Machine, grid: Arrangement) -> None:
        self.recording, self.machine, self.ranks = recording, machine, grid.size
        self.partition = Partition.balanced(grid, recording.sites.coords)
        self.group = RankGroup(self.ranks, min(self.ranks, machine.ranks_per_node))
        self._rank = machine.computing(self.group.per_node).roofline
        self._known: dict[Hashable, torch.Tensor] = {}

    # -- counts -------------------------------------------------------------------------------------------------------

    def owners(self, sites: Sites) -> torch.Tensor:
        """Return the rank of each site, (N,)."""
        return self._cached(("owners", sites), lambda: self.partition.owners(sites.coords))

    def most_sites(self, sites: Sites) -> int:
        """Return the number of sites of the rank with the most."""
        return int(torch.bincount(self.owners(sites), minlength=1).max())

    def most_pairs(self, window: SiteWindow, outputs: Sites) -> int:
        """Return the number of pairs of the rank with the most. A pair is computed by the owner of its output site.

        Parameters
        ----------
        window : SiteWindow
            Pairs of input and output sites.
        outputs : Sites
            Output sites.

        Returns
        -------
        int
        """

        def count() -> torch.Tensor:
            owners = self.owners(outputs)
            counts = [torch.bincount(owners[rows], minlength=self.ranks) for _, rows in window.pairs.pairs]
            return torch.stack(counts).sum(0)

        return int(self._cached(("pairs", window.key), count).max())

    def halo_rows(self, op: SiteOperation) -> torch.Tensor:
        """Return the number of sites that each rank sends to each other one, (ranks, ranks).

        It is -1 between ranks whose boxes are too far apart for a pair: they exchange no message. Other ranks do, even
        if the number is 0.
        """
        window = op.window
        assert window is not None
        return self._cached(("halo", op.inputs, window.low, window.high), lambda: self._sent_rows(op.inputs, window))

    def _sent_rows(self, sites: Sites, window: SiteWindow) -> torch.Tensor:
        table = torch.full((self.ranks, self.ranks), -1)
        owners = self.owners(sites)
        for rank in range(self.ranks):
            sent = rows_by_peer(self.partition, rank, sites.coords[owners == rank], window.low, window.high)
            for peer, rows in sent.items():
                table[rank, peer] = len(rows)
        return table

    def _cached(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def first_of_maps(self) -> Iterable[SiteOperation]:
        """Return the operations that build a map; later ones reuse it."""
        first: dict[Hashable, SiteOperation] = {}
        for op in self.recording.operations:
            if op.window is not None:
                first.setdefault(op.window.key, op)
        return first.values()

    # -- times --------------------------------------------------------------------------------------------------------

    def roofline(self, flops: float, nbytes: float, kernels: int = 1) -> float:
        """Return the seconds of ``kernels`` kernels with this work in total.

        Parameters
        ----------
        flops, nbytes : float
            Work and memory traffic of all kernels.
        kernels : int
            Number of kernels.

        Returns
        -------
        float
            Seconds.
        """
        return self._rank.time(flops, nbytes, math.inf) + (kernels - 1) * self._rank.kernel_s

    def forward(self, op: SiteOperation) -> float:
        """Return the forward seconds on the slowest rank."""
        if op.window is not None:
            return self._gather_time(op, op.channels) + self._product_time(op) + self._scatter_time(op, op.filters)
        return (
            self._product_time(op) if op.kind in ("linear", "head") else self._pass_time(op, LAYER_PASSES[op.kind][0])
        )

    def backward(self, op: SiteOperation) -> float:
        """Return the backward seconds on the slowest rank.

        dy leads to dx, and x and dy to dw; dy is gathered once for both.
        """
        if op.kind in ("linear", "head"):
            return (2 if op.input_gradient else 1) * self._product_time(op)
        if op.window is None:
            return self._pass_time(op, LAYER_PASSES[op.kind][1]) if op.input_gradient else 0.0
        back = self._gather_time(op, op.filters) if op.parameters or op.input_gradient else 0.0
        if op.parameters:
            back += self._gather_time(op, op.channels) + self._product_time(op)
        return back + (self._product_time(op) + self._scatter_time(op, op.channels) if op.input_gradient else 0.0)

    def _pass_time(self, op: SiteOperation, passes: int) -> float:
        """Return the seconds of some passes over the features."""
        size = self.most_sites(op.inputs) * max(op.channels, op.filters) * self.recording.itemsize
        return self.roofline(0, passes * size)

    def _product_time(self, op: SiteOperation) -> float:
        """Return the seconds of rows times a matrix.

        There is one product, or one for each offset of a window. Pooling has none.
        """
        if op.kind == "pooling":
            return 0.0
        size, matrix = self.recording.itemsize, op.channels * op.filters
        if op.window is None:
            rows = op.samples if op.kind == "head" else self.most_sites(op.inputs)
            return self.roofline(2.0 * rows * matrix, size * (rows * (op.channels + op.filters) + matrix))
        pairs = self.most_pairs(op.window, op.outputs)
        return self.roofline(2.0 * pairs * matrix, pairs * (op.channels + op.filters) * size, _offsets(op.window))

    def _gather_time(self, op: SiteOperation, channels: int) -> float:
        """Return the seconds to gather the rows of each offset, one kernel each.

        Pairs of a site with itself need no gather.
        """
        assert op.window is not None
        # Each row is read and written, by an index that is read.
        moved = self.most_pairs(op.window, op.outputs) - self._self_pairs(op, op.window)
        return self.roofline(0, moved * (2 * channels * self.recording.itemsize + INDEX_BYTES), _offsets(op.window))

    def _scatter_time(self, op: SiteOperation, channels: int) -> float:
        """Return the seconds to add the rows of each offset to those of sites."""
        assert op.window is not None
        # Each addition reads two rows and writes one.
        pairs, row = self.most_pairs(op.window, op.outputs), 3 * channels * self.recording.itemsize
        moved = pairs * row + (pairs - self._self_pairs(op, op.window)) * INDEX_BYTES
        return self.roofline(0, moved, _offsets(op.window))

    def _self_pairs(self, op: SiteOperation, window: SiteWindow) -> int:
        """Return the number of pairs of a site with itself."""
        return self.most_sites(op.outputs) if window.pairs.identity is not None else 0

    def map_time(self, op: SiteOperation) -> float:
        """Return the seconds to build the map of a layer and to exchange the sites of its halo."""
        assert op.window is not None
        offsets = len(op.window.pairs.pairs)
        # A map from a set of sites to itself is symmetric, so half of the offsets are searched.
        searched = -(-offsets // 2) if op.window.pairs.identity is not None else offsets
        queries = searched * self.most_sites(op.outputs)
        coordinates = INDEX_BYTES * (1 + self.recording.dimension)
        # Numbers of sites in each direction, then the coordinates.
        asked = 2 * self._exchange_time(op, 0) + self._exchange_time(op, coordinates) if self.ranks > 1 else 0.0
        return self.roofline(0, SEARCH_PASSES * INDEX_BYTES * queries, 6 * searched) + asked

    def halo(self, op: SiteOperation) -> float:
        """Return the seconds to exchange features of other ranks' sites, and their gradients in backward."""
        if self.ranks == 1:
            return 0.0
        return (2 if op.input_gradient else 1) * self._exchange_time(op, op.channels * self.recording.itemsize)

    def _exchange_time(self, op: SiteOperation, row_bytes: int) -> float:
        """Return the seconds until the slowest rank has packed and sent its rows."""
        rows = self.halo_rows(op)
        nodes = torch.arange(self.ranks) // self.machine.ranks_per_node
        far, sent = nodes[:, None] != nodes[None], rows.clamp(min=0) * row_bytes
        # A message without rows costs a latency, too.
        total = torch.zeros(self.ranks, dtype=torch.float64)
        for link, where in ((self.machine.network, far), (self.machine.node, ~far)):
            messages = ((rows >= 0) & where).sum(1)
            total += messages * link.latency_s + (sent * where).sum(1) / link.bandwidth_bytes_per_s
        busiest = int(total.argmax())
        # No rank has a neighbour within reach of the window.
        if not bool((rows[busiest] >= 0).any()):
            return 0.0
        return float(total[busiest]) + self.roofline(0, 4 * float(sent[busiest].sum()), 2) + self._rank.exchange_s

    def sync(self, op: SiteOperation) -> float:
        """Return the seconds of the all-reduces for which a layer waits, forward and backward."""
        if op.kind == "batch_norm":
            return 2 * self.allreduce(2 * 4.0 * op.channels)
        return self.allreduce(op.samples * op.channels * self.recording.itemsize) if op.kind == "global_pool" else 0.0

    def allreduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce over all ranks."""
        return self.machine.allreduce(self.group, nbytes) if nbytes and self.ranks > 1 else 0.0

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory(self) -> float:
        """Return the bytes of saved features and kernel maps, at each layer for the rank with the most."""
        total = 0.0
        for op in self.recording.operations:
            # The rows of a head are samples, whose bytes are negligible.
            if op.kind != "head":
                total += self.most_sites(op.outputs) * op.filters * self.recording.itemsize
            # The tensor of own and received rows (SiteHalo.send) is saved in addition to the features.
            if op.window is not None and self.ranks > 1:
                received = self.halo_rows(op).clamp(min=0).sum(0).max()
                total += (self.most_sites(op.inputs) + int(received)) * op.channels * self.recording.itemsize
        for op in self.first_of_maps():
            assert op.window is not None
            # Both halves of a symmetric map share their indices.
            shared = 2 if op.window.pairs.identity is not None else 1
            total += 2 * INDEX_BYTES * self.most_pairs(op.window, op.outputs) / shared
        return total


def _offsets(window: SiteWindow) -> int:
    """Return the number of offsets with pairs."""
    return sum(1 for rows, _ in window.pairs.pairs if len(rows))


# -- a training step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SitePrediction:
    """Seconds of a training step, and bytes on the rank with the most memory.

    Attributes
    ----------
    grid : Arrangement
    compute : float
        Slowest rank at each layer, and the optimizer.
    maps : float
        Search for pairs.
    halo : float
        Features of other ranks' sites.
    sync : float
        All-reduces of batch norm and of pooling over all sites.
    allreduce : float
        Gradient all-reduce.
    memory : float
        Bytes.
    pairs : float
        Fraction of all pairs, counted at each layer on the rank with the most; 1 / ranks is ideal.
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
        """Seconds of the step. Nothing overlaps."""
        return self.compute + self.maps + self.halo + self.sync + self.allreduce


def predict(
    recording: SparseRecording, machine: Machine, grid: Arrangement, *, optimizer_slots: int = 1
) -> SitePrediction:
    """Predict a training step of the recorded network with its sites split over a grid.

    Parameters
    ----------
    recording : SparseRecording
    machine : Machine
    grid : Arrangement
        Parts along n and the spatial axes.
    optimizer_slots : int
        Tensors of optimizer state per parameter.

    Returns
    -------
    SitePrediction

    Raises
    ------
    DistributionError
        If an axis of the grid does not exist in the example's dimensions.
    """
    costs = SiteCosts(recording, machine, grid)
    operations = recording.operations
    parameters = recording.itemsize * sum(op.parameters for op in operations)
    update = costs.roofline(0, (3 + 2 * optimizer_slots) * parameters)
    total = sum(op.window.pairs.active_pairs for op in operations if op.window)
    busiest = sum(costs.most_pairs(op.window, op.outputs) for op in operations if op.window)
    return SitePrediction(
        grid=grid,
        compute=sum(costs.forward(op) + costs.backward(op) for op in operations) + update,
        maps=sum(costs.map_time(op) for op in costs.first_of_maps()),
        halo=sum(costs.halo(op) for op in operations if op.window),
        sync=sum(costs.sync(op) for op in operations),
        allreduce=sum(costs.allreduce(recording.itemsize * op.parameters) for op in operations),
        memory=costs.memory() + (2 + optimizer_slots) * parameters,
        pairs=busiest / total if total else 0.0,
    )
