"""Agreement between ranks: a difference becomes an error on all ranks instead of a hang or a wrong result.

Four situations:

- Ranks hold a value that must be identical, such as a shape or a file's checksum: :func:`check_same_on_all_ranks`, or
  :func:`find_mismatches` for many numbers at once.
- Ranks are about to exchange messages, which must belong to the same operation: :func:`check_order`.
- An attempt may fail on some ranks alone, such as reading a file that one node cannot see: :func:`try_on_all_ranks`,
  :func:`try_on_rank_0`, or :func:`try_for_same_result` if the results must be identical, too.
- Ranks need the maximum of a number: :func:`allreduce_max`.

All of them are collective: call them on every rank of the communicator, in the same order. Each costs one short
allreduce as long as ranks agree. ``DISTCONV_CHECK`` selects how much is compared.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.derived import CommunicatorRegistry, CommunicatorState
from distconv.errors import CommunicatorError, DistconvError, MismatchError
from distconv.process import call_stack, launchers, watchdog
from distconv.process.environment import CHECK

T = TypeVar("T")

level = CHECK.value_or_default()
"""What ``DISTCONV_CHECK`` selects: ``"off"``, ``"plan"`` or ``"all"``."""

ORDER_CHECKED = 200
"""Number of operations with messages that are compared on each communicator; ``DISTCONV_CHECK=all`` compares all.

They cover the first training steps. A model that calls its layers in a different order on each rank, such as the
members of a set of strings, does so from the first step.
"""

_compares_first = True
"""True while the first operations are compared. Otherwise only ``DISTCONV_CHECK=all`` compares any."""

_EXCERPT_LENGTH = 240
"""Maximum number of characters of a value that an error shows: those around the first difference."""

_SHOWN_RANKS = 8
"""Maximum number of ranks that an error lists."""

_process = os.getpid()
"""The rank's process. A fork of it, such as a worker of a data loader, shares its memory but not its messages."""


# -- the communicator -------------------------------------------------------------------------------------------------


def check_mpi_running() -> None:
    """Check that this process is a rank and that MPI is initialized and not finalized.

    Raises
    ------
    CommunicatorError
        If no rank can be reached from this process.
    """
    if os.getpid() != _process or (not MPI.Is_initialized() and launchers.is_worker_process()):
        raise CommunicatorError(
            f"{multiprocessing.current_process().name} is a worker process, not a rank, so it cannot "
            'communicate. Make grids and distributed tensors only in the ranks, below if __name__ == "__main__":'
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise CommunicatorError("MPI is not running (not initialized yet, or finalized): ranks cannot communicate")


def check_communicator(comm: MPI.Comm, what: str) -> None:
    """Check that messages can be sent over a communicator.

    Parameters
    ----------
    comm : MPI.Comm
        The communicator.
    what : str
        What it is needed for; the error begins with it.

    Raises
    ------
    CommunicatorError
        If MPI is not running, or ``comm`` was freed.
    """
    check_mpi_running()
    if not comm:
        raise CommunicatorError(f"{what}: its communicator was freed, perhaps with its process grid; make a new one")


# -- values that must be identical ------------------------------------------------------------------------------------


def check_same_on_all_ranks(
    comm: MPI.Intracomm, what: str, value: str, fix: str = "pass the same on every rank"
) -> None:
    """Check that all ranks are at the same operation with the same value.

    Collective: call on every rank. One allreduce of 16 bytes; the strings are gathered only if they differ.
    ``DISTCONV_CHECK=off`` skips the comparison.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks to compare.
    what : str
        The operation, such as ``"transfer plan"``. It is compared, too, so that a rank at another operation is found.
    value : str
        The value as the error shows it.
    fix : str
        The suggested fix, with which the error ends.

    Raises
    ------
    CommunicatorError
        If MPI is not running, or ``comm`` was freed.
    MismatchError
        On every rank, with the values of all ranks, if ``what`` or ``value`` differ.
    """
    check_communicator(comm, what)
    if comm.size == 1 or level == "off":
        return
    # With "all", ranks at different calls may pass different duplicates of one communicator. They must compare over the
    # same one to find the difference.
    comm = CommunicatorRegistry.comparison_comm(comm) if level == "all" else comm
    # 7 bytes, not 8: find_mismatches needs the negative of the digest as an int64, too.
    digest = hashlib.blake2b(f"{what}: {value}".encode(errors="surrogatepass"), digest_size=7).digest()
    number = np.array([int.from_bytes(digest, "little")])
    if find_mismatches(comm, number, lambda: f"agreement on {what}").any():
        # The same on all ranks: all of them enter the collective calls that follow, or none does.
        values = comm.allgather((what, value))
        # The message of rank 0 on all ranks, since they may have been called with different texts.
        error = MismatchError(_describe_mismatch(values, comm.bcast(fix)))
        error.names_calls = len({operation for operation, _ in values}) > 1
        raise error


def find_mismatches(comm: MPI.Intracomm, numbers: NDArray[np.int64], what: Callable[[], str]) -> NDArray[np.bool_]:
    """Find the numbers that are not the same on all ranks.

    Collective: call on every rank. One allreduce of 16 bytes for each number.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks to compare.
    numbers : ndarray of int64, shape (n,)
        This rank's numbers; not the smallest int64, which has no negative.
    what : callable
        Returns the description of the wait that the watchdog reports.

    Returns
    -------
    ndarray of bool, shape (n,)
        True where the ranks' numbers differ, identical on all ranks.
    """
    # min(-x) = -max(x): one MIN finds both extremes, and the numbers are the same where the extremes are equal.
    extremes = np.concatenate([numbers, -numbers]).astype(np.int64, copy=False)
    with watchdog.waiting(what):
        comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MIN)
    return np.asarray(extremes[: len(numbers)] != -extremes[len(numbers) :])


def allreduce_max(comm: MPI.Intracomm, value: int, what: str) -> int:
    """Return the maximum of an integer over all ranks.

    Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    value : int
        This rank's value; must fit into an int64.
    what : str
        What it is needed for: errors and the watchdog's report show it.

    Returns
    -------
    int
        The maximum, identical on all ranks.
    """
    check_communicator(comm, what)
    values = np.array([value], dtype=np.int64)
    with watchdog.waiting(lambda: what):
        comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
    return int(values[0])


# -- the order of operations ------------------------------------------------------------------------------------------


def check_order(comm: MPI.Intracomm, what: str) -> None:
    """Check that all ranks are about to send messages for the same operation of the same layer.

    Messages of two layers with equal shapes are matched by nothing but their order: ranks that call the layers in a
    different order would exchange the wrong data. Collective: one allreduce of 16 bytes for each of the first
    ``ORDER_CHECKED`` operations over ``comm``, and none after that. With ``DISTCONV_CHECK=all`` every operation is
    compared, and with ``off`` none.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of the operation.
    what : str
        The operation, such as ``"halo exchange"``. The layer whose ``forward`` is running is added.

    Raises
    ------
    MismatchError
        On every rank, with the operation and the layer of each of them.
    """
    if is_order_checked(comm):
        # Counted first: after a mismatch, too, the count is the same on all ranks.
        CommunicatorState.get(comm).operations += 1
        check_same_on_all_ranks(comm, what + call_stack.running_layer(), "")


def is_order_checked(comm: MPI.Intracomm) -> bool:
    """Return True if :func:`check_order` compares the next operation over ``comm``.

    Raises
    ------
    CommunicatorError
        If MPI is not running.
    """
    check_mpi_running()
    if comm.size == 1 or level == "off":
        return False
    if level == "all":
        return True
    return _compares_first and CommunicatorState.get(comm).operations < ORDER_CHECKED


@contextmanager
def as_in_later_steps() -> Iterator[None]:
    """Treat operations in this block as later ones, which only ``DISTCONV_CHECK=all`` compares.

    For measurements: they time few steps, which must take as long as those of a long training run. Call on every rank.
    """
    global _compares_first
    before, _compares_first = _compares_first, False
    try:
        yield
    finally:
        _compares_first = before


# -- attempts that may fail on some ranks -----------------------------------------------------------------------------


FAILURES = (DistconvError, OSError, LookupError, ValueError, RuntimeError, MemoryError)
"""Errors of one rank that are raised on all ranks."""


def try_on_all_ranks(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError]) -> T:
    """Call a function on every rank; if it fails on any of them, raise the same error on all.

    Use it for every check that may fail on a single rank, such as opening a file that its node cannot see. Without it
    the other ranks would wait for the failed one. Collective: call on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that call it.
    attempt : callable
        Called without arguments.
    error : type
        The class of the error to raise.

    Returns
    -------
    T
        What ``attempt`` returned on this rank.

    Raises
    ------
    error
        On every rank, with the message of the highest rank that failed.

    Warnings
    --------
    Only :data:`FAILURES` are caught. Any other exception, such as a TypeError, is raised on its rank alone, and the
    other ranks wait for it.

    If ``attempt`` communicates, a rank that fails in it leaves the others waiting for its messages. The wait for the
    slowest rank counts against ``DISTCONV_TIMEOUT_S``.
    """
    check_mpi_running()
    result: T | None = None
    reason, broken_pipe = "", None
    try:
        result = attempt()
    # Other exceptions are mistakes in the program. They end the job.
    except FAILURES as failure:
        reason = f"{failure}" or type(failure).__name__
        broken_pipe = failure if isinstance(failure, BrokenPipeError) else None
    # Of several ranks that fail, all report the highest one, so that every rank raises the same message.
    failed = np.array([comm.rank if reason else -1], dtype=np.int64)
    with watchdog.waiting(lambda: "agreement on an outcome"):
        comm.Allreduce(MPI.IN_PLACE, failed, MPI.MAX)
    if failed[0] >= 0:
        message = comm.bcast(reason, root=int(failed[0]))
        # The command line ends silently if this cause is a closed pipe (`distconv ... | head`).
        raise error(message if comm.size == 1 else f"{message} (on rank {failed[0]})") from broken_pipe
    return result  # type: ignore[return-value]


def try_on_rank_0(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError]) -> T:
    """Call a function on rank 0 and return its result on all ranks; if it fails, raise the same error on all.

    Collective: call on every rank.

    Parameters
    ----------
    comm, attempt, error
        As in :func:`try_on_all_ranks`. The result of ``attempt`` must be picklable.

    Returns
    -------
    T
        The result of rank 0.

    Raises
    ------
    error
        On every rank, with the message of rank 0.
    """
    result = try_on_all_ranks(comm, lambda: attempt() if comm.rank == 0 else None, error)
    with watchdog.waiting(lambda: "a result of rank 0"):
        received: T = comm.bcast(result)
    return received


def try_for_same_result(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError], what: str) -> T:
    """Call a function on every rank as :func:`try_on_all_ranks` does, and check that the results are identical.

    Collective: call on every rank.

    Parameters
    ----------
    comm, attempt, error
        As in :func:`try_on_all_ranks`.
    what : str
        The name of the result in the error.

    Returns
    -------
    T
        The result. Results are identical if their ``repr`` is.

    Raises
    ------
    error
        On every rank, if ``attempt`` fails on any.
    MismatchError
        On every rank, if the results differ.
    """
    result = try_on_all_ranks(comm, attempt, error)
    check_same_on_all_ranks(comm, what, repr(result))
    return result


# -- the message of a mismatch ----------------------------------------------------------------------------------------


def _describe_mismatch(values: list[tuple[str, str]], fix: str) -> str:
    """Return the message for ``values``, the operation and the value of each rank."""
    if len({what for what, _ in values}) > 1:
        groups = _group_ranks(f"{what} {value}".strip() for what, value in values)
        listed = "; ".join(f"{text} on {_format_ranks(ranks)}" for text, ranks in groups)
        return f"ranks are at different operations: {listed}; every rank must call the same ones in the same order"
    groups = _group_ranks(value for _, value in values)
    # Up to the end of the shortest value: strict=False.
    same = (len(set(characters)) == 1 for characters in zip(*(text for text, _ in groups), strict=False))
    first_difference = sum(itertools.takewhile(bool, same))
    listed = "; ".join(f"{_excerpt(text, first_difference)} on {_format_ranks(ranks)}" for text, ranks in groups)
    return f"{values[0][0]}: ranks disagree: {listed}; {fix}"


def _group_ranks(texts: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Return each different text with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _excerpt(text: str, position: int) -> str:
    """Return ``text``, or the part around ``position`` of a long one."""
    begin = max(0, position - _EXCERPT_LENGTH // 2) if len(text) > _EXCERPT_LENGTH else 0
    end = begin + _EXCERPT_LENGTH
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _format_ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1, ...``."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (", ..." if len(ranks) > _SHOWN_RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
