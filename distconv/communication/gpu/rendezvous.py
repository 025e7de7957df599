"""Connection of the ranks of torch's process groups through MPI. If one rank fails, all of them stop waiting."""

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
"""Seconds after which the attempt to connect the ranks fails."""

_PAUSE_S = 0.005
"""Seconds between two checks of whether all ranks are connected."""
_LEAVE_S = 1.0
"""Seconds for which a failed attempt's thread is awaited."""

dist: Any = distributed
"""``torch.distributed``, untyped: its stubs lack names that it exports."""

Backend = Any
"""One of torch's process groups, untyped: the stubs lack its methods."""

Group = Callable[[Any, str, MPI.Intracomm, torch.device], Backend]
"""Function that makes a process group, given torch's store, a name, a communicator and a device."""


class ConnectedGroups(NamedTuple):
    """Connected process groups."""

    groups: dict[str, Backend]
    """By name."""
    server: list[Any]
    """On rank 0 the server of their store; keep it as long as the groups."""


def connect_groups(comm: MPI.Intracomm, device: torch.device, group: Group, names: Sequence[str]) -> ConnectedGroups:
    """Make process groups and wait until all ranks are connected. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : torch.device
        The device of their tensors.
    group : callable
        Makes one group.
    names : sequence of str
        The names of the groups.

    Returns
    -------
    ConnectedGroups
        One group for each name.

    Raises
    ------
    CommunicatorError
        On every rank, if it fails on one or takes too long. Groups of the other ranks are aborted.
    """
    hosts = comm.allgather(MPI.Get_processor_name())
    # The name of a single machine need not be resolvable.
    host = hosts[0] if len(set(hosts)) > 1 else "localhost"
    server = try_on_all_ranks(comm, lambda: [_store(host, 0, True)] if comm.rank == 0 else [], CommunicatorError)
    # Rank 0 chose a free port, which the other ranks do not know.
    port = comm.bcast(server[0].port if server else 0)

    def connect() -> dict[str, Backend]:
        with use_device(device):
            store = _store(host, port, False)
            return {name: group(dist.PrefixStore(name, store), name, comm, device) for name in names}

    # If the server is dropped, the store releases the ranks that wait in it.
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
    """Call a function that waits for the other ranks' calls; stop on all ranks if one fails. Collective.

    The function runs in a thread: if it fails on one rank, it would never return on the others. Then all ranks call
    ``give_up``, which must release them, and undo what succeeds nevertheless.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    attempt : callable
        Called without arguments in a thread.
    undo : callable
        Called with the result of an attempt that succeeds too late.
    give_up : callable
        Called without arguments on all ranks if one of them fails.

    Returns
    -------
    T
        The result of ``attempt`` on this rank.

    Raises
    ------
    CommunicatorError
        On every rank, as soon as the attempt fails on one, or after :data:`CONNECT_S` seconds.
    """
    outcome: Future[T] = Future()
    end = time.monotonic() + CONNECT_S

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except Exception as error:  # of any class: the other ranks must stop waiting
            outcome.set_exception(RuntimeError(first_line(error)))

    # The thread calls no MPI. If it never returns, a daemon does not keep the process alive.
    thread = threading.Thread(target=run, name="distconv-rendezvous", daemon=True)
    thread.start()
    try:
        while True:
            done, late = outcome.done(), time.monotonic() > end
            try_on_all_ranks(comm, partial(_check_outcome, outcome, done, late), CommunicatorError)
            if not allreduce_max(comm, int(not done), "connecting to the other ranks"):
                return outcome.result()
            time.sleep(_PAUSE_S)
    except CommunicatorError:
        give_up()
        outcome.add_done_callback(lambda came: None if came.exception() else undo(came.result()))
        thread.join(_LEAVE_S)
        raise


def _check_outcome(outcome: Future[T], done: bool, late: bool) -> None:
    if done:
        outcome.result()
    elif late:
        raise TimeoutError(f"the ranks were not connected within {CONNECT_S:g} s")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message. Those of torch continue with a C++ stack."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def use_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that makes ``device`` the current GPU of this thread, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
