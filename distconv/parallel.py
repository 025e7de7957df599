"""``parallelize``: make an ordinary module train on distributed tensors with exact gradients."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI

from distconv import reduction, watchdog
from distconv.agreement import agree
from distconv.errors import MismatchError, UnsupportedOperation
from distconv.grid import ProcessGrid

M = TypeVar("M", bound=torch.nn.Module)


def parallelize(model: M, grid: ProcessGrid, *, broadcast: bool = False) -> M:
    """Prepare ``model`` for tensors distributed over ``grid``; returns the same module. Collective.

    Its layers stay as they are: they meet distributed operators through the tensors. Gradients of its parameters are
    from now on summed behind the backward pass. Parameters and buffers must be equal on all ranks; with
    ``broadcast=True`` rank 0's are sent to the others instead.

    Raises
    ------
    MismatchError
        On all ranks, naming the first parameter or buffer that differs between ranks.
    UnsupportedOperation
        If the grid splits channels.
    """
    if not isinstance(grid, ProcessGrid):
        raise UnsupportedOperation(f"parallelize needs a ProcessGrid, not {type(grid).__name__}")
    if grid.shape["c"] > 1:
        raise UnsupportedOperation(
            f"parallelize over {grid.describe()}: axis 'c' (channels) has no operators; use n, d, h, w"
        )
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    described = "; ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in state.items())
    agree(grid.world, "parallelize", f"{type(model).__name__}: {described}")
    with watchdog.waiting(lambda: "parallelize"):
        if broadcast:
            for tensor in state.values():
                _broadcast(grid, tensor)
        else:
            _check_equal(grid, state)
    for parameter in model.parameters():
        reduction.mark(parameter)
    return model


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _broadcast(grid: ProcessGrid, tensor: torch.Tensor) -> None:
    values = _bytes(tensor).copy()
    grid.world.Bcast([values, MPI.BYTE], root=0)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(values).view(tensor.dtype).reshape(tensor.shape))


def _check_equal(grid: ProcessGrid, state: dict[str, torch.Tensor]) -> None:
    digests = np.array([_digest(tensor) for tensor in state.values()], dtype=np.int64)
    extremes = np.concatenate([digests, -digests])
    grid.world.Allreduce(MPI.IN_PLACE, extremes, MPI.MIN)
    low, high = extremes[: len(digests)], -extremes[len(digests) :]
    different = [name for name, differs in zip(state, low != high, strict=True) if differs]
    if different:
        raise MismatchError(
            f"parallelize: {len(different)} of {len(state)} parameters and buffers differ between ranks, the first is "
            f"{different[0]!r}; seed all ranks alike before building the model, or pass broadcast=True"
        )


def _digest(tensor: torch.Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(_bytes(tensor).tobytes(), digest_size=7).digest(), "little")
