"""Count the copies of whole activations in a training step on a grid.

    mpiexec -n 2 python -m mpi4py -m tests.jobs.bench.steps.copies h=2 channels_last mesh1k 512 unet 256 resnet50 224

The arguments are the grid, a memory format, and pairs of a network and the size of its samples. A network is a
reference model, or ``convolution`` or ``batch-norm``, as in ``distconv bench step``. A copy counts if its shape is that
of this rank's block of an input or an output of a layer: torch's profiler reports ``aten::copy_``, on which all copies
and conversions of the memory format end. Rank 0 prints the copies of a step, and their elements relative to those of
the outputs of all layers.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.jobs.bench.steps import torch_step
from distconv.layers.models import MODELS
from distconv.memory_format import convert_weights, named_format

BATCH = 2


def build(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a network and its input."""
    if name in torch_step.KINDS:
        model, x, _ = torch_step.build(torch_step.StepOptions(name, size, 16, 4, BATCH))
        return model, x
    reference = MODELS[name]
    return reference(), torch.randn(BATCH, reference.sample[0], *(size for _ in reference.sample[1:]))


def count(name: str, size: int, grid: dc.ProcessGrid, order: str) -> str:
    """Return the row of a network. Collective."""
    torch.manual_seed(0)
    model, x = build(name, size)
    convert_weights(model, order)
    x = x.contiguous(memory_format=named_format(order, x.dim()))
    with torch.no_grad():
        y = model(x)
    labels = torch.randint(0, y.shape[1], (len(y), *y.shape[2:]))
    dc.parallelize(model, grid)
    batch, target = dc.scatter(x, grid), dc.scatter(labels, grid, dims="nhw"[: labels.dim()])
    blocks: list[tuple[bool, tuple[int, ...]]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not any(True for _ in module.children()):
            blocks.extend((made, tuple(t.local.shape)) for made, t in ((False, inputs[0]), (True, output)))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    for _ in range(2):  # the first one fills caches
        blocks.clear()
        model.zero_grad()
        with torch.profiler.profile(record_shapes=True) as profile:
            F.cross_entropy(model(batch), target).backward()
    for hook in hooks:
        hook.remove()
    shapes, outputs = {shape for _, shape in blocks}, sum(math.prod(shape) for made, shape in blocks if made)
    copies = [tuple(e.input_shapes[0]) for e in profile.events() if e.name == "aten::copy_" and e.input_shapes]
    copied = [math.prod(shape) for shape in copies if shape in shapes]
    return f"{name}, {size}: {len(copied)} copies, {sum(copied) / outputs:.3f} of the elements of all outputs"


def main() -> None:
    """Print a row for each network, on rank 0."""
    shape, order, *pairs = sys.argv[1:]
    torch.set_num_threads(1)
    grid = dc.ProcessGrid(MPI.COMM_WORLD, **dc.parse_grid(shape))
    for name, size in zip(pairs[::2], pairs[1::2], strict=True):
        row = count(name, int(size), grid, order)
        if grid.rank == 0:
            print(row, flush=True)


if __name__ == "__main__":
    main()
