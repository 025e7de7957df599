"""What a process on a CPU has resident at most, beyond the tensors of a training step.

    libraries    the interpreter, torch, MPI, and the packages of the model
    columns      what a convolution unfolds its input into where torch does not leave it to oneDNN
    rearranged   the input and the output of a convolution in oneDNN's order, channels in blocks: elsewhere
    holes        what an allocator may hold free: a tenth and 128 MiB; at most what a step takes and frees, all
                 columns among it

None of the four is fitted to measured steps: the libraries are weighed, the others counted. On a GPU torch's allocator
and cuDNN stand for the last three, of which nothing is said here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.cost.operation_work import LocalCall, local_call
from distconv.perfmodel.graph.graph import LayerGraph, Operation

FREE_FRACTION, FREE_BYTES = 0.10, 128 << 20
"""Memory that an allocator may hold free: this fraction of what is in use at most, and so many bytes."""

START_BYTES = 260 << 20
"""Of a rank that has imported distconv: the interpreter, torch 2.13 (CPU), mpi4py and h5py on Linux."""

LIBRARIES_BYTES = START_BYTES + (80 << 20)
"""Of one that has trained a tiny model: with torch's compiler and sympy, which the first optimizer imports (70 MiB).

What a model's own packages take is beyond it."""

SMALL = 20480
"""Elements up to which torch convolves one sample by itself."""

MARGIN = 0.2
"""What is to be left free of a limit, as a share of the prediction: all of 28 measured steps were less above it."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes resident at the peak of a step on the fullest rank."""

    tensors: float
    libraries: float
    convolutions: float
    holes: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.tensors + self.libraries + self.convolutions + self.holes

    def fits(self, limit: float) -> bool:
        """Return True if ``limit`` bytes are enough, with ``MARGIN`` to spare."""
        return (1 + MARGIN) * self.total <= limit


def process_memory(
    graph: LayerGraph, grids: Mapping[str, AxisParts], prediction: Prediction, packages: float = 0.0
) -> ProcessMemory:
    """Of the process of a rank for which :func:`.evaluate` predicts this over the ``grids``.

    ``packages`` are the bytes that the model's own packages take.
    """
    calls = [(op, local_call(op, grids[op.layer])) for op in graph.operations if _convolves(op)]
    convolutions = max((_inside(op, call) for op, call in calls), default=0.0)
    # Columns are larger than what is around them, and tensors that are kept come to lie between those of two layers.
    columns = sum(_inside(op, call) for op, call in calls if not _by_onednn(op, call.inputs[0]))
    tensors = prediction.memory
    libraries = LIBRARIES_BYTES + packages
    may_be_free = FREE_FRACTION * (libraries + tensors + convolutions) + FREE_BYTES
    holes = min(may_be_free, tensors - prediction.lasting + columns)
    return ProcessMemory(tensors, libraries, convolutions, holes)


def _convolves(op: Operation) -> bool:
    return op.window is not None and op.kind.startswith("conv")


def _by_onednn(op: Operation, block: tuple[int, ...]) -> bool:
    """Return True if torch leaves a convolution of this block to oneDNN: ``use_mkldnn`` in its Convolution.cpp.

    One sample of few elements is not, nor float64; of volumes torch counts all extents but the last, so that
    few can be many.
    """
    assert op.window is not None
    if op.y.dtype != "float32":
        return False
    large_kernel = len(op.window.kernel) > 1 and min(op.window.kernel[-2:]) > 3
    return block[0] > 1 or op.groups > 1 or large_kernel or math.prod(block[:4]) > SMALL


def _inside(op: Operation, call: LocalCall) -> float:
    """What a convolution takes besides its input and its output, on one rank."""
    assert op.window is not None
    x, y = (math.prod(shape) * op.y.itemsize for shape in (call.inputs[0], call.outputs[0]))
    if _by_onednn(op, call.inputs[0]):
        return float(x + y)
    # A column for each output: the values under the kernel, of one sample after the other.
    extents = (call.inputs if op.window.transposed else call.outputs)[0][2:]
    features = (call.outputs if op.window.transposed else call.inputs)[0][1]
    return float(math.prod(op.window.kernel) * features * math.prod(extents) * op.y.itemsize)
