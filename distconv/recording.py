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
        """Record the start of an exchange of (peer, tensor) messages, over MPI or a ``channel`` of process groups.

        Parameters
        ----------
        exchange : object
        comm : object
        sends : sequence of object
        receives : sequence of object
        what : str
        channel : object
        """

    def record_wait(self, operation: Any) -> None:
        """Record the wait for an exchange or a reduction; called before the wait.

        Parameters
        ----------
        operation : object
        """

    def record_reduction(
        self, reduction: Any, comm: Any, tensor: torch.Tensor, op: Any, what: str, *, channel: Any
    ) -> None:
        """Record the start of an in-place all-reduce of ``tensor``.

        Parameters
        ----------
        reduction : object
        comm : object
        tensor : Tensor
        op : object
        what : str
        channel : object
        """

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], launches: bool = False) -> Any:
        """Call ``function`` with ``tensors``, now and in each replay.

        With ``launches`` the function only enqueues work on a GPU.

        Parameters
        ----------
        function : callable
        tensors : sequence of Tensor
        launches : bool

        Returns
        -------
        object
        """

    def try_on_all_ranks(self, world: Any, body: Callable[[], Any]) -> Any:
        """Run ``body``; if it fails on any rank of ``world``, now or in a replay, raise on all of them.

        Parameters
        ----------
        world : object
        body : callable

        Returns
        -------
        object
        """

    paused: bool


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
