"""Outputs of a model, and gradients of its input, from the ranks of one stage to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.errors import ShapeError
from distconv.parallel import broadcast_tensor
from distconv.pipeline.stage.structures import Boundary, flatten, split_samples
from distconv.placement import gather
from distconv.process import watchdog


@contextmanager
def evaluation_mode(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Set all stages to evaluation mode inside the block, and restore the mode of each module."""
    modules = [module for stage in stages for module in (*stage.modules(), *getattr(stage, "recorded_modules", ()))]
    modes = [module.training for module in modules]
    try:
        for stage in stages:
            stage.eval()
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def broadcast_boundary(comm: MPI.Intracomm, ranks: range, boundary: Boundary | None, device: torch.device) -> Boundary:
    """Return the full tensors of a stage on all ranks. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks of the pipeline.
    ranks : range
        Ranks of the replica that has the tensors.
    boundary : Boundary or None
        On these ranks: the tensors. Otherwise ignored.
    device : device
        Device of the result.

    Returns
    -------
    Boundary
        New tensors.
    """
    mine: list[Any] = []
    described = None
    if comm.rank in ranks:
        assert boundary is not None
        # gather() is collective over the ranks of the stage's grid.
        mine = [None if each is None else gather(each).detach().contiguous() for each in boundary.tensors]
        described = [None if each is None else (each.shape, each.dtype) for each in mine], boundary.structure
    with watchdog.waiting(lambda: f"tensors from rank {ranks[0]}"):
        specs, structure = comm.bcast(described, ranks[0])
        if comm.rank != ranks[0]:
            mine = [None if spec is None else torch.empty(spec[0], dtype=spec[1], device=device) for spec in specs]
        for tensor in (tensor for tensor in mine if tensor is not None):
            broadcast_tensor(comm, tensor, ranks[0])
    return Boundary(mine, structure)


def concatenate(outputs: Sequence[Boundary]) -> Any:
    """Return the outputs of a mini-batch from those of its micro-batches.

    Parameters
    ----------
    outputs : sequence of Boundary
        Outputs of the micro-batches in order.

    Returns
    -------
    object
        Value of the structure of the outputs. Tensors are concatenated along the samples.

    Raises
    ------
    ShapeError
        If outputs do not have the samples first, or differ between micro-batches in anything but tensors.
    """
    first = outputs[0]
    if any((each.structure, len(each.tensors)) != (first.structure, len(first.tensors)) for each in outputs):
        raise ShapeError("predict: the model returns other containers or constants for some of the micro-batches")
    columns = list(zip(*(each.tensors for each in outputs), strict=True))
    for tensor, *_ in columns:
        if len(outputs) > 1 and not tensor.dim():
            raise ShapeError(
                "predict: the model returns a tensor without dimensions, which cannot be put together from several "
                "micro-batches; use one micro-batch"
            )
    return Boundary([torch.cat(each) if len(each) > 1 else each[0] for each in columns], first.structure).value()


def add_input_gradients(x: Any, gradients: Sequence[Boundary]) -> None:
    """Add the gradients of a mini-batch's input to the graph of the caller, which sets ``.grad`` of its leaves.

    Parameters
    ----------
    x : object
        Input of the mini-batch.
    gradients : sequence of Boundary
        Gradients of the micro-batches in order, for each tensor.
    """
    tensors = flatten(x, "x").tensors
    pieces = [flatten(piece, "x").tensors for piece in split_samples(x, len(gradients))]
    roots, values = [], []
    for index, tensor in enumerate(tensors):
        terms = [each.tensors[index] for each in gradients]
        if tensor.requires_grad and any(term is not None for term in terms):
            terms = [
                torch.zeros_like(of[index]) if term is None else term for term, of in zip(terms, pieces, strict=True)
            ]
            roots.append(tensor)
            values.append(torch.cat(terms) if tensor.dim() else torch.stack(terms).sum())
    torch.autograd.backward(roots, values)
