"""Over which values the batch norms of a model take their statistics.

::

    global    the whole mini-batch: the numbers of one process
    spatial   the samples that a rank has a part of, of which the ranks along d, h and w have the rest
    local     what this rank has

:func:`take` says it to a model. With ``spatial`` and ``local`` each group of ranks normalises as if its values were a
mini-batch of their own. Its statistics then enter the running ones as mini-batches do in Ioffe and Szegedy's
inference: E[x] is the mean of the groups' means, Var[x] that of their unbiased variances, each group with the weight
of its values. So running statistics stay the same on all ranks, and are what the groups' own would come to on average;
the variance between groups is left out, because no value was ever normalised by it. What the layers of a model have
found is summed over ranks in one message, when the call of the model ends.

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

BATCH_NORM = ("global", "spatial", "local")


@dataclass(eq=False)
class Update:
    """Running statistics that are to move towards what the ranks of ``comm`` have found together.

    ``shares`` (2, C): this rank's part of the sums that are mean and variance, in float64.
    """

    comm: MPI.Intracomm
    shares: torch.Tensor
    mean: torch.Tensor | None
    variance: torch.Tensor | None
    momentum: float


@dataclass(eq=False)
class _Call:
    """A call of a module that takes its statistics ``over`` something."""

    over: str
    error: BaseException | None = None
    """What was being handled when it began."""
    updates: list[Update] = field(default_factory=list)
    """What is to be brought together; only the outermost call has any."""


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("batch_norm_calls", default=())
"""Those that are under way, the innermost last."""


def statistics() -> str:
    """What batch norm takes its statistics over in the call that is under way."""
    calls = _calls.get()
    return calls[-1].over if calls else "global"


def take(model: torch.nn.Module, over: str) -> None:
    """Let all of ``model``, from now on, take statistics ``over`` one of BATCH_NORM; each module also by itself."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (_Begin, _End))]:
                del hooks[key]
        if over != "global":
            module.register_forward_pre_hook(_Begin(over), prepend=True)
            module.register_forward_hook(_End(), always_call=True)


@contextmanager
def taken_over_all() -> Iterator[None]:
    """Inside, statistics are global whatever the model's are."""
    before = _calls.set((*_calls.get(), _Call("global")))
    try:
        yield
    finally:
        _calls.reset(before)


def later(update: Update) -> None:
    """Make ``update`` when the call that is under way ends."""
    _calls.get()[0].updates.append(update)


def settle() -> None:
    """Make the updates that wait for the end of the call. Collective."""
    for call in _calls.get()[:1]:
        _bring_together(call.updates)
        call.updates.clear()


@dataclass(frozen=True)
class _Begin:
    """Forward pre-hook of a module."""

    over: str

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        _calls.set((*_calls.get(), _Call(self.over, sys.exc_info()[1])))


class _End:
    """Forward hook of a module, called if it failed, too."""

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        *outer, call = _calls.get()
        _calls.set(tuple(outer))
        error = sys.exc_info()[1]
        # A recomputation ends with an exception. Any other may be this rank's alone, and nobody would answer.
        if error is call.error or isinstance(error, checkpoint._StopRecomputationError):
            _bring_together(call.updates)


def _bring_together(updates: list[Update]) -> None:
    groups: dict[tuple[int, torch.device], list[Update]] = {}
    for update in updates:
        groups.setdefault((update.comm.handle, update.shares.device), []).append(update)
    for group in groups.values():
        flat = torch.cat([update.shares.flatten() for update in group])
        allreduce(group[0].comm, flat, "running statistics")
        for update, sums in zip(group, flat.split([update.shares.numel() for update in group]), strict=True):
            mean, variance = sums.view_as(update.shares)
            move(update.mean, mean, update.momentum)
            move(update.variance, variance, update.momentum)


def move(running: torch.Tensor | None, statistic: torch.Tensor, momentum: float) -> None:
    """Move a running statistic, if there is one, towards that of a mini-batch, as torch does."""
    if running is not None:
        with torch.no_grad():
            running.mul_(1 - momentum).add_(statistic.to(running.dtype), alpha=momentum)
