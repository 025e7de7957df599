"""For benchmarks that have a prediction beside each measurement: how they take times, and their tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from distconv.distribution import Distribution
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class Comparison:
    """Measured times of something and what was predicted for it, all in seconds."""

    name: str
    measured_s: Sequence[float]
    predicted_s: float

    @property
    def mean_s(self) -> float:
        """Mean of the measured times."""
        return statistics.fmean(self.measured_s)

    @property
    def deviation_s(self) -> float:
        """Their standard deviation."""
        return deviation(self.measured_s)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {"mean_s": self.mean_s, "deviation_s": self.deviation_s, "predicted_s": self.predicted_s}


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample, as an estimate of that of all; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table_head(label: str) -> str:
    """Column names for :func:`row`."""
    return f"{label:<44} {'mean':>10} {'deviation':>10} {'predicted':>10}  predicted/mean"


def row(found: Comparison) -> str:
    """A line of the table."""
    return (
        f"{found.name:<44} {1e3 * found.mean_s:10.3f} {1e3 * found.deviation_s:10.3f} "
        f"{1e3 * found.predicted_s:10.3f}  {found.predicted_s / found.mean_s:14.3f}"
    )


def timed(comm: MPI.Intracomm, device: torch.device, action: Callable[[], object]) -> float:
    """Seconds until all ranks of ``comm`` are done with ``action``, which they begin together. Collective."""
    comm.Barrier()
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    slowest: float = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    return slowest


def random(dist: Distribution, shape: Sequence[int], device: torch.device) -> DistTensor:
    """Random numbers of a global ``shape``, of which each rank makes its own block."""
    return DistTensor(torch.randn(dist.local_shape(shape), device=device), dist, shape)
