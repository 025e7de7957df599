"""Resident memory of a process on a CPU, beyond the tensors of a training step.

It consists of four parts::

    libraries    the interpreter, torch, MPI, and the packages of the model
    columns      the unfolded input of a convolution where torch does not use oneDNN
    rearranged   copies of a convolution's input, output and weights in oneDNN's blocked layout
    holes        free memory that an allocator holds: a tenth of the memory in use and 128 MiB, but not more than a step
                 allocates and frees, the columns of all convolutions included

None of the four is fitted to measured steps: the libraries are measured, the others counted. On a GPU, torch's
allocator and cuDNN replace the last three, which this module does not model.
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
"""Most free memory that an allocator may hold: this fraction of the memory in use, plus this many bytes."""

START_BYTES = 260 << 20
"""Bytes of a rank that has imported distconv: the interpreter, torch 2.13 (CPU), mpi4py and h5py on Linux."""

LIBRARIES_BYTES = START_BYTES + (80 << 20)
"""Bytes of a rank that has trained a tiny model.

They include torch's compiler and sympy, which the first optimizer imports (70 MiB). The packages of a model are extra.
"""

SMALL = 20480
"""Largest number of elements of a single sample that torch convolves without oneDNN."""

MARGIN = 0.2
"""Fraction of the prediction that must stay free. All of 28 measured steps exceeded the prediction by less."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes resident at the peak of a step on the rank with the most.

    Attributes
    ----------
    tensors : float
        Memory of the step, from :func:`.evaluate`.
    libraries : float
        Interpreter and packages.
    convolutions : float
        Temporary buffers of the largest convolution.
    holes : float
        Free memory that the allocator holds.
    """

    tensors: float
    libraries: float
    convolutions: float
    holes: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.tensors + self.libraries + self.convolutions + self.holes

    def fits(self, limit: float) -> bool:
        """Return True if ``limit`` bytes are enough, with ``MARGIN`` to spare."""
        return (1 + MARGIN) * self.total <= limit


def process_memory(
    graph: LayerGraph, grids: Mapping[str, AxisParts], prediction: Prediction, packages: float = 0.0
) -> ProcessMemory:
    """Return the resident memory of a rank's process for a predicted step.

    Parameters
    ----------
    graph : LayerGraph
    grids : mapping of str to AxisParts
        Grid of each deciding layer.
    prediction : Prediction
        Result of :func:`.evaluate` for these grids.
    packages : float
        Bytes that the model's own packages take.

    Returns
    -------
    ProcessMemory
    """
    convolutional = [op for op in graph.operations if op.window is not None and op.kind.startswith("conv")]
    calls = [(op, local_call(op, grids[op.layer])) for op in convolutional]
    # Buffers of one convolution are free before the next one runs, so the largest counts.
    convolutions = max((_workspace_bytes(op, call) for op, call in calls), default=0.0)
    # Columns are larger than other tensors, and saved tensors fill the memory between those of two layers.
    columns = sum(_workspace_bytes(op, call) for op, call in calls if not _uses_onednn(op, call.inputs[0]))
    tensors = prediction.memory
    libraries = LIBRARIES_BYTES + packages
    may_be_free = FREE_FRACTION * (libraries + tensors + convolutions) + FREE_BYTES
    holes = min(may_be_free, tensors - prediction.lasting + columns)
    return ProcessMemory(tensors, libraries, convolutions, holes)


def _uses_onednn(op: Operation, block: tuple[int, ...]) -> bool:
    """Return True if torch uses oneDNN to convolve this block (``use_mkldnn`` in torch's Convolution.cpp).

    It does not for float64 and for one sample of few elements. For volumes, torch counts all dimensions but the last.
    """
    assert op.window is not None
    if op.y.dtype != "float32":
        return False
    large_kernel = len(op.window.kernel) > 1 and min(op.window.kernel[-2:]) > 3
    return block[0] > 1 or op.groups > 1 or large_kernel or math.prod(block[:4]) > SMALL


def _workspace_bytes(op: Operation, call: LocalCall) -> float:
    """Return the bytes that a convolution takes in addition to its input, output and weights, on one rank."""
    assert op.window is not None
    x, y = (math.prod(shape) * op.y.itemsize for shape in (call.inputs[0], call.outputs[0]))
    if _uses_onednn(op, call.inputs[0]):
        return float(x + y + math.prod(call.constants[0]) * op.y.itemsize)
    # One column for each output holds the values under the kernel. Samples are unfolded one by one.
    extents = (call.inputs if op.window.transposed else call.outputs)[0][2:]
    features = (call.outputs if op.window.transposed else call.inputs)[0][1]
    return float(math.prod(op.window.kernel) * features * math.prod(extents) * op.y.itemsize)
