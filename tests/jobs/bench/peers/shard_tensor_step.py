"""Steps of plain torch and of ShardTensor: the program that :mod:`.shard_tensor` starts in other environments.

    python shard_tensor_step.py CASE SIZE KIND MODE [RANKS RANK FILE]

KIND is ``contiguous`` or ``channels_last`` for plain torch, and ``shards`` for ShardTensor over rows; MODE is ``eager``
or ``compiled``. The last three are for ShardTensor: the number of ranks, this rank, and the file by which they meet.
Rank 0 reads a number of steps per line and answers with the seconds of the last step and the loss. The program imports
neither distconv nor MPI.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

CHANNELS = 16


def _network() -> nn.Module:
    layers = [(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(module for layer in layers for module in layer))


CASES: dict[str, Callable[[], nn.Module]] = {
    "network": _network,
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "pooling": lambda: nn.AvgPool2d(2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest": lambda: nn.Upsample(scale_factor=2),
}
"""Modules, applied to one sample of 16 channels. The network is 4 x (conv 3x3, ReLU)."""


def build(case: str, size: int, *, channels_last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """Return the module of a case and its input (1, 16, size, size) in float32; seeded.

    Parameters
    ----------
    case : str
        One of ``CASES``.
    size : int
        Height and width.
    channels_last : bool
        Memory format of the input and the weights.

    Returns
    -------
    (torch.nn.Module, Tensor)
    """
    torch.manual_seed(0)
    module, x = CASES[case](), torch.randn(1, CHANNELS, size, size)
    order = torch.channels_last if channels_last else torch.contiguous_format
    return module.to(memory_format=order), x.contiguous(memory_format=order)  # type: ignore[call-overload]


def step_of(module: nn.Module, x: torch.Tensor, *, compiled: bool = False) -> Callable[[], torch.Tensor]:
    """Return a step: forward, mean of squares, backward, SGD. A module without weights gets an input with a gradient.

    Parameters
    ----------
    module : torch.nn.Module
    x : Tensor
        Input.
    compiled : bool
        True compiles module and loss by ``torch.compile``.

    Returns
    -------
    callable
        Takes a step and returns the loss.
    """
    leaves: list[torch.Tensor] = [*module.parameters()]
    leaves = leaves or [x.requires_grad_()]
    optimizer = torch.optim.SGD(leaves, 1e-3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module(x)
        return y.square().mean()

    evaluate = torch.compile(loss) if compiled else loss

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = evaluate(x)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _sharded(module: nn.Module, x: torch.Tensor, ranks: int, rank: int, file: str) -> tuple[nn.Module, Any]:
    """Return the module with replicated weights and this rank's rows of the input, as its users make them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module

    # Without its own initialization, which takes a GPU for granted. Its operators are only registered if there is one.
    # The time limit ends a step in which one of the ranks has failed.
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=ranks, timeout=limit)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    peer = importlib.import_module("physicsnemo.domain_parallel")

    peer.register_custom_ops()
    rows = x.chunk(ranks, 2)[rank].contiguous()
    own = peer.ShardTensor.from_local(rows, mesh, (Shard(2),), sharding_shapes="chunk", global_shape=tuple(x.shape))
    return distribute_module(module, mesh), own.detach()


def main() -> None:
    """Take the requested numbers of steps until a request is 0."""
    case, size, kind, mode, *place = sys.argv[1:]
    torch.set_num_threads(1 if place else 2)
    module, x = build(case, int(size), channels_last=kind == "channels_last")
    rank = 0
    if place:
        rank = int(place[1])
        module, x = _sharded(module, x, int(place[0]), rank, place[2])
    step = step_of(module, x, compiled=mode == "compiled")
    while count := _agreed(int(sys.stdin.readline() or 0) if rank == 0 else 0, bool(place)):
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            seconds = time.perf_counter() - start
        value = loss.full_tensor() if place else loss  # type: ignore[attr-defined]
        if rank == 0:
            print(json.dumps([seconds, value.item()]), flush=True)


def _agreed(count: int, several: bool) -> int:
    """Return rank 0's number of steps on all ranks."""
    if not several:
        return count
    counts = torch.tensor([count])
    torch.distributed.broadcast(counts, 0)
    return int(counts)


if __name__ == "__main__":
    main()
