"""What a process on a CPU has resident at most, beyond the tensors of a training step.

    libraries    the interpreter, torch, MPI
    columns      what a convolution unfolds its input into where torch does not leave it to oneDNN
    rearranged   the input and the output of a convolution in oneDNN's order, channels in blocks: elsewhere
    holes        what is free in the heap, as far as :mod:`distconv.process.memory.bound` lets it grow

None of the four is fitted to measured steps: the libraries are weighed, the others counted. On a GPU torch's allocator
and cuDNN stand for the last three, of which nothing is said here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from distconv.perfmodel.cost.block_geometry import Parts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.graph import LayerGraph, Operation
from distconv.process.memory.bound import FREE_BYTES, SLACK

LIBRARIES_BYTES = 262 << 20
"""Of a rank before a model is built: torch 2.13 (CPU), mpi4py and h5py on Linux. What a model's own
package takes is beyond it."""

SMALL = 20480
"""Elements up to which torch convolves one sample by itself."""

MARGIN = 0.2
"""What is to be left free of a limit, as a share of the prediction: 23 of 28 measured steps were less above it."""


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
        """Whether ``limit`` bytes are enough, with ``MARGIN`` to spare."""
        return (1 + MARGIN) * self.total <= limit


def process_memory(graph: LayerGraph, grids: Mapping[str, Parts], tensors: float) -> ProcessMemory:
    """Of the process of a rank whose ``tensors`` take so much, as :func:`.evaluate` predicts, over the ``grids``."""
    convolutions = max((_inside(op, grids[op.layer]) for op in graph.operations if _convolves(op)), default=0.0)
    # Resident memory may be so much above what was in use at most when free memory is given back.
    return ProcessMemory(tensors, LIBRARIES_BYTES, convolutions, (SLACK - 1) * tensors + FREE_BYTES)


def _convolves(op: Operation) -> bool:
    return op.window is not None and op.kind.startswith("conv")


def _by_onednn(op: Operation, block: tuple[int, ...]) -> bool:
    """Whether torch leaves a float32 convolution of this block to oneDNN: ``use_mkldnn`` in its Convolution.cpp.

    One sample of few elements is not; of volumes torch counts all extents but the last, so that few can be many.
    """
    assert op.window is not None
    large_kernel = len(op.window.kernel) > 1 and min(op.window.kernel[-2:]) > 3
    return block[0] > 1 or op.groups > 1 or large_kernel or math.prod(block[:4]) > SMALL


def _inside(op: Operation, parts: Parts) -> float:
    """What a convolution takes besides its input and its output, on one rank."""
    assert op.window is not None
    call = local_call(op, parts)
    x, y = (math.prod(shape) * op.y.itemsize for shape in (call.inputs[0], call.outputs[0]))
    if op.y.dtype == "float32" and _by_onednn(op, call.inputs[0]):
        return float(x + y)
    # A column for each output: the values under the kernel, of one sample after the other.
    extents = (call.inputs if op.window.transposed else call.outputs)[0][2:]
    features = (call.outputs if op.window.transposed else call.inputs)[0][1]
    return float(math.prod(op.window.kernel) * features * math.prod(extents) * op.y.itemsize)
