"""The values over which the batch norms of a model compute their statistics.

::

    global    the full mini-batch, as in a single process
    spatial   the samples of which this rank has a part; the ranks along d, h and w have the rest of them
    local     this rank's values

:func:`set_batch_norm_scope` registers hooks on a model that set the scope of each call. With ``spatial`` and ``local``
each group of ranks normalizes as if its values were a mini-batch of their own. The groups' statistics update the
running ones as mini-batches do in the inference of Ioffe and Szegedy. E[x] is the mean of the groups' means, and Var[x]
is the mean of their unbiased variances. Both are weighted by the groups' numbers of values. Running statistics thus
stay identical on all ranks and equal the groups' own on average. The variance between groups is left out, because no
value was normalized by it.

Updates are collected while the model runs, and one all-reduce sums those of all layers at the end of the outermost
call.

Source: Dryden et al. 2019, III-B; Ioffe and Szegedy 2015, Algorithm 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from mpi4py import MPI
from torch.utils import checkpoint

from distconv.communication.transport import allreduce

BATCH_NORM_SCOPES = ("global", "spatial", "local")
"""Names of the scopes."""


@dataclass(eq=False)
class StatisticsUpdate:
    """A pending update of running statistics.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks over which ``partial_sums`` is summed.
    partial_sums : Tensor, shape (2, C)
        This rank's contributions to the mean and the variance, in float64.
    mean, variance : Tensor or None
        The running statistics, shape (C,), which the update modifies.
    momentum : float
        Weight of the new statistics.
    """

    comm: MPI.Intracomm
    partial_sums: torch.Tensor
    mean: torch.Tensor | None
    variance: torch.Tensor | None
    momentum: float


@dataclass(eq=False)
class _Call:
    """A call of a module whose hooks set the scope."""

    scope: str
    error: BaseException | None = None
    """The exception that was being handled when the call began."""
    updates: list[StatisticsUpdate] = field(default_factory=list)
    """Pending updates; only the outermost call has any."""


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("batch_norm_calls", default=())
"""The calls in progress, the innermost last."""


def current_scope() -> str:
    """Return the scope of the innermost call in progress, by default ``"global"``."""
    calls = _calls.get()
    return calls[-1].scope if calls else "global"


def set_batch_norm_scope(model: torch.nn.Module, scope: str) -> None:
    """Set the scope of the batch norms of a model, for calls of the model and of each of its modules.

    Parameters
    ----------
    model : torch.nn.Module
        Model whose batch norms get the scope.
    scope : {"global", "spatial", "local"}
        The scope, which replaces an earlier one.
    """
    # Hooks of an earlier call are removed.
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (_EnterScope, _LeaveScope))]:
                del hooks[key]
        if scope != "global":
            # Before all other hooks, so that modules which hooks call have the scope, too.
            module.register_forward_pre_hook(_EnterScope(scope), prepend=True)
            module.register_forward_hook(_LeaveScope(), always_call=True)


@contextmanager
def global_statistics() -> Iterator[None]:
    """Use global statistics inside the block, whatever the scope of the model is."""
    previous = _calls.set((*_calls.get(), _Call("global")))
    try:
        yield
    finally:
        _calls.reset(previous)


def defer_update(update: StatisticsUpdate) -> None:
    """Apply ``update`` at the end of the outermost call in progress, which must exist.

    Parameters
    ----------
    update : StatisticsUpdate
        Update of the running statistics of one batch norm.
    """
    _calls.get()[0].updates.append(update)


def apply_updates() -> None:
    """Apply the pending updates now. Collective: call on every rank."""
    # Updates are collected by the outermost call.
    for call in _calls.get()[:1]:
        _reduce_updates(call.updates)
        call.updates.clear()


@dataclass(frozen=True)
class _EnterScope:
    """Forward pre-hook of a module: sets the scope."""

    scope: str

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        _calls.set((*_calls.get(), _Call(self.scope, sys.exc_info()[1])))


class _LeaveScope:
    """Forward hook of a module, which torch also calls after a failure: restores the scope and applies the updates."""

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        *outer, call = _calls.get()
        _calls.set(tuple(outer))
        error = sys.exc_info()[1]
        # The all-reduce is collective: after an exception of this rank alone, the other ranks would not take part. But
        # torch ends each recomputation of activations with an exception, on all ranks.
        if error is call.error or isinstance(error, checkpoint._StopRecomputationError):
            _reduce_updates(call.updates)


def _reduce_updates(updates: list[StatisticsUpdate]) -> None:
    """Sum the contributions of all ranks, in one all-reduce for each communicator and device, and apply the updates."""
    # In the order of the updates, which is the same on all ranks: each communicator has an all-reduce.
    groups: dict[tuple[int, torch.device], list[StatisticsUpdate]] = {}
    for update in updates:
        groups.setdefault((update.comm.handle, update.partial_sums.device), []).append(update)
    for group in groups.values():
        # One message for all layers: each of them would cost the latency of an all-reduce.
        flat = torch.cat([update.partial_sums.flatten() for update in group])
        allreduce(group[0].comm, flat, "running statistics")
        for update, sums in zip(group, flat.split([update.partial_sums.numel() for update in group]), strict=True):
            mean, variance = sums.view_as(update.partial_sums)
            update_running_statistic(update.mean, mean, update.momentum)
            update_running_statistic(update.variance, variance, update.momentum)


def update_running_statistic(running: torch.Tensor | None, statistic: torch.Tensor, momentum: float) -> None:
    """Move a running statistic, if there is one, towards that of a mini-batch, as torch does.

    Parameters
    ----------
    running : Tensor or None
        The running statistic, which is modified.
    statistic : Tensor
        That of the mini-batch, of the same shape.
    momentum : float
        Weight of ``statistic``.
    """
    if running is not None:
        with torch.no_grad():
            running.mul_(1 - momentum).add_(statistic.to(running.dtype), alpha=momentum)
