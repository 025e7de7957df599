"""What a step does beside torch's operators, as a recording of it sees it (:mod:`distconv.capture`).

Operators arrive at a recorder below Python's dispatch. Here the rest is told to it: messages, checks of values, what
is done only where values ask for it. Without a recording these functions just do what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """What records a step."""

    def posted(
        self, exchange: Any, comm: Any, sends: Sequence[Any], receives: Sequence[Any], what: str, *, channel: Any
    ) -> None:
        """Messages (peer, tensor) have been posted, by MPI or a ``channel`` of process groups."""

    def waited(self, operation: Any) -> None:
        """An exchange, or a reduction, is about to be waited for."""

    def reduced(self, reduction: Any, comm: Any, tensor: torch.Tensor, op: Any, what: str, *, channel: Any) -> None:
        """The sum of ``tensor`` has been started in its memory."""

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], launches: bool = False) -> Any:
        """Call ``function`` of ``tensors``, now and in each replay; ``launches``: it only gives work to a GPU."""

    def together(self, world: Any, body: Callable[[], Any]) -> Any:
        """Run ``body``; if it fails on any rank of ``world``, now or in a replay, it fails on all of them."""

    paused: bool


active: Recorder | None = None
"""The recording that is under way in this process."""


def call(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``function(*tensors)``, which looks at values, or at what is no tensor: each replay calls it again.

    It returns tensors, or None, and is not differentiated.
    """
    return function(*tensors) if active is None else active.call(function, tensors)


def launch(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Call ``function(*tensors)``, which gives a GPU work on their memory that is no operator of torch."""
    if active is None:
        function(*tensors)
    else:
        active.call(function, tensors, launches=True)


@contextmanager
def paused() -> Iterator[None]:
    """Inside is nothing that a replay has to do: comparisons between ranks that decide nothing."""
    if active is None:
        yield
        return
    recorder, before = active, active.paused
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = before
