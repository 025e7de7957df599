"""The rendezvous of torch's process groups: ranks find each other through MPI, and all give up when one has to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as distributed
from mpi4py import MPI

from distconv.communication.agreement import allreduce_max, try_on_all_ranks
from distconv.errors import CommunicatorError

T = TypeVar("T")

CONNECT_S = 120.0
"""How long it may take until all ranks are connected."""

_PAUSE_S = 0.005
_LEAVE_S = 1.0

dist: Any = distributed
"""Torch exports from it what its types do not say."""

Backend = Any
"""One of torch's process groups, of which its types do not say what it can do."""

Group = Callable[[Any, str, MPI.Intracomm, torch.device], Backend]
"""Makes one by torch's store, of that name, over the ranks of a communicator, for tensors of a device."""


class ConnectedGroups(NamedTuple):
    """Process groups by their names, and on rank 0 what serves their store."""

    groups: dict[str, Backend]
    server: list[Any]


def connect_groups(comm: MPI.Intracomm, device: torch.device, group: Group, names: Sequence[str]) -> ConnectedGroups:
    """Process groups of these ``names``, each made by ``group``. Collective.

    Raises
    ------
    CommunicatorError
        On all ranks, if it fails on one or takes too long; those of the others are aborted.
    """
    hosts = comm.allgather(MPI.Get_processor_name())
    host = hosts[0] if len(set(hosts)) > 1 else "localhost"
    server = try_on_all_ranks(comm, lambda: [_store(host, 0, True)] if comm.rank == 0 else [], CommunicatorError)
    port = comm.bcast(server[0].port if server else 0)

    def connect() -> dict[str, Backend]:
        with use_device(device):
            store = _store(host, port, False)
            return {name: group(dist.PrefixStore(name, store), name, comm, device) for name in names}

    # Without its server the store lets go of those that wait in it.
    return ConnectedGroups(attempt_with_timeout(comm, connect, _abort, give_up=server.clear), server)


def _store(host: str, port: int, serves: bool) -> Any:
    limit = timedelta(seconds=CONNECT_S)
    return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)


def _abort(groups: dict[str, Backend]) -> None:
    for group in groups.values():
        group.abort()


def attempt_with_timeout(
    comm: MPI.Intracomm, attempt: Callable[[], T], undo: Callable[[T], None], give_up: Callable[[], object]
) -> T:
    """What ``attempt`` returns, which waits for the other ranks' attempts. Collective.

    It runs in a thread: where it fails on one rank, the others would never come back from theirs. Then all call
    ``give_up``, which is to make them come back, and what comes through after all is undone.

    Raises
    ------
    CommunicatorError
        On all ranks, as soon as it has failed on one, or after :data:`CONNECT_S`.
    """
    outcome: Future[T] = Future()
    end = time.monotonic() + CONNECT_S

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except Exception as error:  # whatever it is, the other ranks are to hear of it
            outcome.set_exception(RuntimeError(first_line(error)))

    thread = threading.Thread(target=run, name="distconv-rendezvous", daemon=True)
    thread.start()
    try:
        while True:
            done, late = outcome.done(), time.monotonic() > end
            try_on_all_ranks(comm, partial(_looked_at, outcome, done, late), CommunicatorError)
            if not allreduce_max(comm, int(not done), "connecting to the other ranks"):
                return outcome.result()
            time.sleep(_PAUSE_S)
    except CommunicatorError:
        give_up()
        outcome.add_done_callback(lambda came: None if came.exception() else undo(came.result()))
        thread.join(_LEAVE_S)
        raise


def _looked_at(outcome: Future[T], done: bool, late: bool) -> None:
    if done:
        outcome.result()
    elif late:
        raise TimeoutError(f"the ranks were not connected within {CONNECT_S:g} s")


def first_line(error: Exception) -> str:
    """What it says; torch's errors go on with where in C++ that was."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def use_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` this thread's, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
