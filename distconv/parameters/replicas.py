"""Comparison of parameters and buffers that several ranks hold.

Gradient reductions already compare the weights that they cover (``communication.weight_digest``);
:class:`ReplicaComparison` covers the rest. :func:`check_replicas` compares everything, for users.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from mpi4py import MPI

from distconv.arrangement import AXES
from distconv.communication import gradient_reduction
from distconv.communication.agreement import allreduce_max, try_on_all_ranks
from distconv.communication.digest import checksum, describe_difference, digest
from distconv.errors import MismatchError, UnsupportedOperation
from distconv.process import watchdog
from distconv.tensor import DistTensor


def check_replicas(model: torch.nn.Module, comm: MPI.Intracomm) -> None:
    """Check that parameters and buffers are identical, bit for bit, on all ranks that hold them.

    Blocks of sharded parameters are compared between the ranks that hold the same block. Training keeps replicas
    identical: a difference means that a rank has computed, received or stored a wrong value without an error.

    Collective: call on every rank of ``comm``. One digest of all parameters and an all-reduce with 16 bytes for each
    tensor.

    Parameters
    ----------
    model : Module
        The model.
    comm : MPI.Intracomm
        The ranks that train the model.

    Raises
    ------
    MismatchError
        On every rank, with the name of the first tensor that differs, and the ranks that have each value.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> grid = dc.ProcessGrid(n=1)
    >>> dc.check_replicas(dc.parallelize(torch.nn.Linear(3, 2), grid), grid.world)
    """
    check_tensors(dict(model.named_parameters()) | dict(model.named_buffers()), comm, "check_replicas")


def check_tensors(
    tensors: Mapping[str, torch.Tensor],
    comm: MPI.Intracomm,
    what: str,
    summary: Callable[[torch.Tensor], int] = digest,
) -> None:
    """Check that tensors are the same, bit for bit, on all ranks that hold them.

    Collective: one allreduce with 16 bytes for each tensor. Names that only some ranks have are not compared.

    Parameters
    ----------
    tensors : Mapping[str, torch.Tensor]
        Plain tensors, which must be the same on all ranks, and DistTensors, whose blocks must be the same on all ranks
        that hold them; in the same order on all ranks.
    comm : MPI.Intracomm
        The ranks that hold the tensors.
    what : str
        The caller, with which the error begins.
    summary : callable
        Returns the number that is compared: :func:`distconv.communication.digest.digest`, or ``checksum``, which is
        faster.

    Raises
    ------
    MismatchError
        On all ranks, naming the first tensor that differs, and the ranks that have each value.
    UnsupportedOperation
        On all ranks, if one is a DTensor.
    """
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise UnsupportedOperation(
                f"{what}: {name!r} is a DTensor, which torch.distributed has sharded. Use "
                "torch.distributed.checkpoint, or pass the full tensors (tensor.full_tensor())"
            )
    names = list(tensors)
    # Both calls on every rank. The maximum of -n is minus the minimum of n.
    if allreduce_max(comm, len(names), what) != -allreduce_max(comm, -len(names), what):
        # The names may differ: rank 0 of a pipeline has the optimizer state of all stages when it saves.
        with watchdog.waiting(lambda: what):
            on_all = set.intersection(*map(set, comm.allgather(names)))
        tensors = {name: tensors[name] for name in names if name in on_all}
    try_on_all_ranks(comm, lambda: _check(tensors, comm, what, summary), MismatchError)


def _check(
    tensors: Mapping[str, torch.Tensor], comm: MPI.Intracomm, what: str, summary: Callable[[torch.Tensor], int]
) -> None:
    groups: dict[int, tuple[MPI.Intracomm, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        holders = _holders(tensor, comm)
        # Ranks meet in the order of the names, which is the same on all of them.
        groups.setdefault(holders.handle, (holders, {}))[1][name] = _block(tensor)
    # Compare all groups before raising: comparisons are collective, and a rank that raised would miss the next one.
    differences = [describe_difference(*group, comm.rank, summary) for group in groups.values()]
    for text in filter(None, differences):
        raise MismatchError(f"{what}: {text}")


COMPARED_EVERY = 10
"""Forward passes after which :class:`ReplicaComparison` compares weights."""


class ReplicaComparison:
    """Comparison of buffers, and of weights that no gradient reduction compares.

    An all-reduce of a gradient carries a checksum of its weight over the same ranks. Layers with replicated input, such
    as a head after global pooling, reduce nothing, and other layers reduce over only some axes of the grid.
    """

    def __init__(self) -> None:
        self._passes = {True: 0, False: 0}

    def step(self, model: torch.nn.Module, comm: MPI.Intracomm, *, trains: bool) -> None:
        """Count a forward pass, and compare in every tenth one. Collective: call on every rank of ``comm``.

        In training the comparisons begin at the second pass: the first backward pass determines which weights gradient
        reductions compare, and only the others are compared here. In evaluation they begin at the first pass, with all
        weights.

        Parameters
        ----------
        model : Module
            The model.
        comm : MPI.Intracomm
            The ranks that hold the model.
        trains : bool
            True for a pass in training. Otherwise the pass is an evaluation.

        Raises
        ------
        MismatchError
            On all ranks, naming the first weight or buffer that differs, and the ranks that have each value.
        """
        self._passes[trains] += 1
        if self._passes[trains] % COMPARED_EVERY != 1 + trains:
            return
        left = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not is_dtensor(tensor)
            and (not trains or gradient_reduction.ranks_compared(_block(tensor)) < _holders(tensor, comm).size)
        }
        check_tensors(left, comm, "training" if trains else "evaluation", checksum)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor of torch.distributed."""
    # DTensors only exist if their module has been imported. Importing it here would take long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _block(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, DistTensor) else tensor


def _holders(tensor: torch.Tensor, comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator of the ranks that hold the same block as this one."""
    # Ranks along axes that do not split the tensor hold the same block.
    return tensor.grid.comm(set(AXES) - set(tensor.dist.split)) if isinstance(tensor, DistTensor) else comm
