"""Agreement between ranks: find out that they differ before that becomes a hang or a wrong number.

``DISTCONV_CHECK`` chooses how much is compared.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.derived import Derived, Record
from distconv.errors import CommunicatorError, DistconvError, MismatchError
from distconv.process import call_stack, launchers, watchdog
from distconv.process.environment import CHECK

T = TypeVar("T")

LONGEST = 240
"""Characters of a text that a message shows: a large model's description would hide where it differs."""

ORDER_CHECKED = 200
"""Operations with messages that are compared on each communicator unless ``DISTCONV_CHECK=all`` compares all of them.

They cover the first training steps. A model that calls its layers in a different order on each rank, such as the
members of a set of strings, does so from the first step.
"""

_process = os.getpid()
"""A fork of it, such as a worker of a data loader, shares its memory but not its messages."""

level = CHECK.value_or_default()


def check_running() -> None:
    """Raise CommunicatorError before MPI is initialized, once it is finalized, and in processes that are no ranks.

    Raises
    ------
    CommunicatorError
        If no rank can be reached from here.
    """
    if os.getpid() != _process or (not MPI.Is_initialized() and launchers.is_worker()):
        raise CommunicatorError(
            f"{multiprocessing.current_process().name} is a worker process of a rank, and no rank: it cannot reach "
            'others. Make grids and distributed tensors in the ranks alone, below if __name__ == "__main__":'
        )
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise CommunicatorError("MPI is not running (not initialized yet, or finalized): no rank can be reached")


def check_usable(comm: MPI.Comm, what: str) -> None:
    """Check that messages can go over ``comm``; ``what`` for, in the error's text.

    Raises
    ------
    CommunicatorError
        If MPI is not running, or ``comm`` was freed.
    """
    check_running()
    if not comm:
        raise CommunicatorError(f"{what}: its communicator was freed, perhaps with its process grid; make a new one")


def agree(comm: MPI.Intracomm, what: str, value: str, way_out: str = "pass the same on every rank") -> None:
    """Raise MismatchError on every rank unless all ranks of ``comm`` pass the same ``what`` and ``value``. Collective.

    One allreduce of 16 bytes when they agree; the texts travel only when they do not. ``way_out`` ends the error.

    Raises
    ------
    MismatchError
        On every rank, with what each of them has.
    """
    check_usable(comm, what)
    if comm.size == 1 or level == "off":
        return
    # Ranks at different calls find out if both compare on one communicator, whichever duplicate each was given.
    comm = Derived.compared(comm) if level == "all" else comm
    # 7 bytes: the number and its negative must fit into an int64, for one MIN tells both extremes.
    digest = hashlib.blake2b(f"{what}: {value}".encode(errors="surrogatepass"), digest_size=7).digest()
    mine = np.array([int.from_bytes(digest, "little")])
    if apart(comm, mine, lambda: f"agreement on {what}").any():
        values = comm.allgather((what, value))
        error = MismatchError(_disagreement(values, comm.bcast(way_out)))
        error.names_calls = len({operation for operation, _ in values}) > 1
        raise error


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
        Record.of(comm).operations += 1
        agree(comm, what + call_stack.layer_being_called(), "")


def is_order_checked(comm: MPI.Intracomm) -> bool:
    """Return True if :func:`check_order` compares the next operation over ``comm``.

    Raises
    ------
    CommunicatorError
        If MPI is not running.
    """
    check_running()
    if comm.size == 1 or level == "off":
        return False
    return level == "all" or Record.of(comm).operations < ORDER_CHECKED


def apart(comm: MPI.Intracomm, numbers: NDArray[np.int64], what: Callable[[], str]) -> NDArray[np.bool_]:
    """Which of ``numbers`` are not the same on all ranks. Collective: one allreduce of 16 bytes for each."""
    extremes = np.concatenate([numbers, -numbers]).astype(np.int64, copy=False)
    with watchdog.waiting(what):
        comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MIN)
    return np.asarray(extremes[: len(numbers)] != -extremes[len(numbers) :])


def _disagreement(values: list[tuple[str, str]], way_out: str) -> str:
    if len({what for what, _ in values}) > 1:
        listed = "; ".join(
            f"{text} on {_ranks(ranks)}" for text, ranks in _grouped(f"{w} {v}".strip() for w, v in values)
        )
        return f"ranks are at different operations: {listed}; every rank must call the same ones in the same order"
    groups = _grouped(v for _, v in values)
    texts = [text for text, _ in groups]
    alike = (len(set(letters)) == 1 for letters in zip(*texts, strict=False))
    place = sum(itertools.takewhile(bool, alike))
    listed = "; ".join(f"{_from(text, place)} on {_ranks(ranks)}" for text, ranks in groups)
    return f"{values[0][0]}: ranks disagree: {listed}; {way_out}"


def _from(text: str, place: int) -> str:
    """``text``, of a long one what is about ``place``."""
    begin = max(0, place - LONGEST // 2) if len(text) > LONGEST else 0
    end = begin + LONGEST
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _grouped(texts: Iterable[str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def largest(comm: MPI.Intracomm, value: int, what: str) -> int:
    """The largest of the ranks' ``value``. Collective."""
    check_usable(comm, what)
    values = np.array([value], dtype=np.int64)
    with watchdog.waiting(lambda: what):
        comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
    return int(values[0])


def together(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError]) -> T:
    """Run ``attempt`` on every rank; if it fails on any of them raise ``error`` with that rank's reason on all.

    For what only one rank may notice, such as a file its node cannot see. Nobody who reads what it prints any more is
    the error's cause there, which ends a command without a word. Collective over ``comm``.
    """
    check_running()
    result: T | None = None
    reason, unread = "", None
    try:
        result = attempt()
    except (DistconvError, OSError, LookupError, ValueError, RuntimeError, MemoryError) as failure:
        reason = f"{failure}" or type(failure).__name__
        unread = failure if isinstance(failure, BrokenPipeError) else None
    # Of several that fail the highest rank's reason is shown: all raise the same text.
    worst = np.array([comm.rank if reason else -1], dtype=np.int64)
    with watchdog.waiting(lambda: "agreement on an outcome"):
        comm.Allreduce(MPI.IN_PLACE, worst, MPI.MAX)
    if worst[0] >= 0:
        text = comm.bcast(reason, root=int(worst[0]))
        raise error(text if comm.size == 1 else f"{text} (on rank {worst[0]})") from unread
    return result  # type: ignore[return-value]


def try_on_rank_0(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError]) -> T:
    """Run ``attempt`` on rank 0 and return its result on all ranks; errors are as in :func:`together`. Collective."""
    result = together(comm, lambda: attempt() if comm.rank == 0 else None, error)
    with watchdog.waiting(lambda: "a result of rank 0"):
        received: T = comm.bcast(result)
    return received


def alike(comm: MPI.Intracomm, attempt: Callable[[], T], error: type[DistconvError], what: str) -> T:
    """Run ``attempt`` on every rank as :func:`together` does, and return what all of them found. Collective.

    Raises
    ------
    MismatchError
        If the texts (``repr``) of what they found differ.
    """
    value = together(comm, attempt, error)
    agree(comm, what, repr(value))
    return value
