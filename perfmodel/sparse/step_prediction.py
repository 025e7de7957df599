"""``predict``: the time and memory of a training step of a sparse network whose sites are split over a grid."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.arrangement import Arrangement
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.sparse.recording import SparseRecording
from distconv.perfmodel.sparse.site_costs import SiteCosts


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
        Fraction of all pairs that the rank with the most pairs computes; 1 / ranks is ideal.
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
