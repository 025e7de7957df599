"""Parameters and buffers of all stages: checks that ranks agree, and copies between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.parallel import broadcast_tensor
from distconv.pipeline.schedules.actions import ScheduleError
from distconv.placement import gather
from distconv.process import watchdog
from distconv.tensor import DistTensor


def collect_state(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of all stages, by the number of the stage and their name."""
    return {
        f"{index}.{name}": tensor
        for index, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def describe_stages(modules: Sequence[Any]) -> str:
    """Return a description of the stages that ranks compare first; elements may be other objects than modules."""
    stateful = [module for module in modules if isinstance(module, nn.Module)]
    tensors = "; ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in collect_state(stateful).items())
    return f"{', '.join(type(module).__name__ for module in modules)}; {tensors}"


def find_shared(modules: Sequence[nn.Module], count: int) -> list[list[str]]:
    """Return the parameters that stages on different ranks share.

    Parameters
    ----------
    modules : sequence of Module
        All stages.
    count : int
        Number of stages with ranks of their own.

    Returns
    -------
    list of list of str
        Names of each such parameter: the number of the module, a dot, and the name in the module.

    Raises
    ------
    ScheduleError
        If a stage is distributed already, or stages on different ranks share a buffer.
    """
    # Modules with the same index modulo count are chunks of one stage, which may share tensors.
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in collect_state(modules).items():
        if isinstance(tensor, DistTensor):
            stage = name.partition(".")[0]
            raise ScheduleError(f"stage {stage}: {name} is already distributed; pass plain modules and use plans=")
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    shared = [key for key, each in names.items() if len({int(name.partition(".")[0]) % count for name in each}) > 1]
    for key in shared:
        if not isinstance(tensors[key], nn.Parameter):
            raise ScheduleError(
                f"{' and '.join(names[key])} are one buffer, but their stages are on different ranks; give each its "
                "own, or cut the model elsewhere"
            )
    return [names[key] for key in shared]


def broadcast_stage(comm: MPI.Intracomm, module: nn.Module, root: int, owned: bool) -> None:
    """Copy the state of a stage to all ranks that do not own it. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
    module : Module
        The stage.
    root : int
        Rank that sends.
    owned : bool
        True if this rank owns the stage or a block of it. Otherwise its tensors are overwritten.
    """
    # Every rank has the modules of all stages, and so the same number and order of broadcasts.
    for tensor in collect_state([module]).values():
        # If the stage is split over a grid, all of its ranks own a block and gather the full tensor.
        value = gather(tensor.detach()) if owned else tensor
        with watchdog.waiting(lambda: "bringing a stage's state to all ranks"):
            broadcast_tensor(comm, value, root)
