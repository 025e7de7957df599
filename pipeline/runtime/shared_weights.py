"""Parameters that several stages use, such as the embedding and the output layer of a language model.

The first of these stages owns a parameter. Before an update all of them get the sum of their gradients, in the order of
the stages. The optimizer of the owner then updates the parameter, and the others receive its new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import nn

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import PlanError
from distconv.parallel import broadcast_tensor
from distconv.process import watchdog
from distconv.tensor import DistTensor

from .placement import StagePlacement
from .replicas import has_gradients


class _Group(NamedTuple):
    """Parameters that the same stages use.

    ``comm`` has all ranks of these stages. ``roots`` has the first rank of each stage in it, the owner's first.
    """

    comm: MPI.Intracomm
    roots: list[int]
    parameters: list[nn.Parameter]


class SharedWeights:
    """Parameters that the stage of this rank shares with others. Collective: construct on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks of the pipeline.
    placement : StagePlacement
    modules : sequence of Module
        Modules of all stages; those of this rank are distributed already.
    names : sequence of list of str
        Names of each shared parameter, as of :func:`.find_shared`.

    Raises
    ------
    PlanError
        If a plan splits a shared parameter.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: StagePlacement,
        modules: Sequence[nn.Module],
        names: Sequence[Sequence[str]],
    ) -> None:
        stages = len(placement.replicas)
        own = placement.positions[comm.rank].stage
        by_users: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.borrowed: set[int] = set()
        """Identities of the parameters that another stage owns."""

        def find() -> None:
            for of_parameter in names:
                found = {int(name.partition(".")[0]) % stages: _find(modules, name) for name in of_parameter}
                users = tuple(sorted(found))
                parameter = found.get(own, found[users[0]])
                if isinstance(parameter, DistTensor):
                    raise PlanError(
                        f"pipeline: stages {list(users)} share {of_parameter[0]}, which a plan splits over ranks; "
                        "keep it complete on every rank, without the axis c and shard_weights"
                    )
                by_users.setdefault(users, []).append(parameter)
                if own in users[1:]:
                    self.borrowed.add(id(parameter))

        try_on_all_ranks(comm, find, PlanError)
        self._groups: list[_Group] = []
        # In one order on all ranks, since Split is collective over all of them.
        for users, parameters in by_users.items():
            ranks = [rank for rank, position in enumerate(placement.positions) if position.stage in users]
            group = comm.Split(0 if own in users else MPI.UNDEFINED, comm.rank)
            if own in users:
                roots = [ranks.index(placement.ranks(stage, 0)[0]) for stage in users]
                self._groups.append(_Group(MPI.Intracomm(group), roots, parameters))

    def sum_gradients(self, what: str) -> None:
        """Replace the gradient of each parameter by the sum over its stages. Collective over these stages.

        Parameters
        ----------
        what : str
            Description for the watchdog.
        """
        # All ranks pass through their groups in one order, here and in copy_weights(), so that none waits in a circle.
        for comm, roots, parameters in self._groups:
            with watchdog.waiting(lambda: what):
                present = comm.allgather(has_gradients(parameters))
                for index, parameter in enumerate(parameters):
                    terms = []
                    for root in (root for root in roots if present[root][index]):
                        term = torch.empty_like(parameter) if parameter.grad is None else parameter.grad.clone()
                        broadcast_tensor(comm, term, root)
                        terms.append(term)
                    for term in terms[1:]:
                        terms[0] += term
                    parameter.grad = terms[0] if terms else None

    def copy_weights(self, what: str) -> None:
        """Copy the values of each parameter from its owner. Collective over its stages.

        Parameters
        ----------
        what : str
            Description for the watchdog.
        """
        for comm, roots, parameters in self._groups:
            with watchdog.waiting(lambda: what):
                for parameter in parameters:
                    broadcast_tensor(comm, parameter.detach(), roots[0])

    def close(self) -> None:
        """Free the communicators. Collective: call on every rank."""
        for group in self._groups:
            group.comm.Free()
        self._groups.clear()


def _find(modules: Sequence[nn.Module], name: str) -> nn.Parameter:
    index, _, inner = name.partition(".")
    return modules[int(index)].get_parameter(inner)
