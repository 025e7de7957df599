"""Effects of a step that a recording (:mod:`distconv.capture`) cannot observe through torch's dispatcher.

A recorder receives torch operators below Python's dispatch. Communication, checks of values, and code that depends on
values notify the recorder through the functions of this module. Without a recorder the functions only do the work. This
module does not import ``distconv.capture``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """The interface of an object that records a step."""

    def record_exchange(
        self, exchange: Any, comm: Any, sends: Sequence[Any], receives: Sequence[Any], what: str, *, channel: Any
    ) -> None:
        """Record the start of an exchange of messages.

        Parameters
        ----------
        exchange : object
            Identifies the exchange in :meth:`record_wait`.
        comm : MPI.Intracomm
            The ranks.
        sends, receives : sequence of (int, Tensor)
            Peers with the tensors to send and to receive into.
        what : str
            Description for the watchdog.
        channel : object or None
            The channel of process groups that sends the messages; None for MPI.
        """

    def record_wait(self, operation: Any) -> None:
        """Record the wait for an exchange or a reduction; called before the wait.

        Parameters
        ----------
        operation : object
            The exchange or the reduction, as in the call that recorded its start.
        """

    def record_reduction(
        self, reduction: Any, comm: Any, tensor: torch.Tensor, op: Any, what: str, *, channel: Any
    ) -> None:
        """Record the start of an in-place all-reduce.

        Parameters
        ----------
        reduction : object
            Identifies the reduction in :meth:`record_wait`.
        comm : MPI.Intracomm
            The ranks.
        tensor : Tensor
            The contribution of this rank, which the result overwrites.
        op : MPI.Op
            The operation.
        what, channel
            As in :meth:`record_exchange`.
        """

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], launches: bool = False) -> Any:
        """Call a function, now and in each replay.

        Parameters
        ----------
        function : callable
            Returns tensors or None.
        tensors : sequence of Tensor
            Its arguments.
        launches : bool
            True if the function only enqueues work on a GPU. Otherwise it may also read values.

        Returns
        -------
        object
            The result of ``function``.
        """

    def try_on_all_ranks(self, world: Any, body: Callable[[], Any]) -> Any:
        """Call a function; if it fails on any rank, now or in a replay, raise on all ranks.

        Collective: call on every rank of ``world``.

        Parameters
        ----------
        world : MPI.Intracomm
            The ranks.
        body : callable
            Called without arguments.

        Returns
        -------
        object
            The result of ``body``.
        """

    paused: bool
    """True excludes operations and messages from the recording. Otherwise they are recorded."""


active: Recorder | None = None
"""The recorder of this process; None if no step is being recorded."""


def call(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Call a function whose effects the recorder cannot observe, such as reading values; each replay calls it again.

    Parameters
    ----------
    function : callable
        Returns tensors or None. Autograd does not differentiate it.
    *tensors : Tensor
        Its arguments.

    Returns
    -------
    object
        The result of ``function``.
    """
    return function(*tensors) if active is None else active.call(function, tensors)


def launch(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Call a function that enqueues GPU work other than torch operators; each replay calls it again.

    Parameters
    ----------
    function : callable
        Returns None.
    *tensors : Tensor
        Its arguments, whose memory the work uses.
    """
    if active is None:
        function(*tensors)
    else:
        active.call(function, tensors, launches=True)


@contextmanager
def paused() -> Iterator[None]:
    """Exclude the block from the recording: it compares ranks, and no result depends on it."""
    if active is None:
        yield
        return
    recorder, before = active, active.paused
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = before
