"""Messages and all-reduces through torch's process groups: NCCL, or gloo on CPUs.

With NCCL the host never waits for messages: the GPU does, on a stream. A :class:`Channel` has two process groups, one
for messages and one for all-reduces, which overlap with each other. Within a group operations run one after another, so
all ranks must launch them in the same order. The ranks of a process grid do; the stages of a pipeline do not, and use
MPI. gloo does the same on CPUs with ``DISTCONV_TRANSPORT=torch``.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.gpu import rendezvous
from distconv.communication.gpu.rendezvous import dist
from distconv.errors import CommunicatorError
from distconv.process import endings, watchdog

Message = tuple[int, torch.Tensor]
"""Peer rank and a contiguous tensor."""

_OPERATIONS = ((MPI.SUM, "SUM"), (MPI.PROD, "PRODUCT"), (MPI.MAX, "MAX"), (MPI.MIN, "MIN"))
"""MPI's reductions, and torch's names for them."""

_MESSAGES, _SUMS = "messages", "sums"

_channels: list[weakref.ref[Channel]] = []


@dataclass(eq=False)
class Launch:
    """An operation in flight."""

    started_at: float
    """``time.monotonic()`` at the launch."""
    what: str
    """The operation, for the watchdog's report."""
    works: Sequence[Any]
    """torch's handles."""
    joined: bool = False
    """True if later work waits for it. Otherwise :meth:`Channel.join` remains to be called."""

    def is_done(self) -> bool:
        """Return True if the operation is complete."""
        return all(work.is_completed() for work in self.works)


def is_available() -> bool:
    """Return True if torch has NCCL, with process groups that can be aborted (torch 2.6 or newer)."""
    return dist.is_available() and dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL, "abort")


def _find_overdue_launches() -> Iterator[tuple[float, Callable[[], str]]]:
    """Yield the start and the description of operations that a GPU has not completed in time, for the watchdog.

    The watchdog calls it in its own thread, from which calls of CUDA would open a context on GPU 0 and end the capture
    of a graph. So CUDA is called only for operations that are overdue, when the job is about to be ended anyway.
    """
    for channel in open_channels():
        if channel.device.type == "cpu":
            continue  # the host itself waits for gloo, which cannot report completion before
        # Oldest first: those after the first that is not overdue are not overdue either.
        for launch in itertools.takewhile(_overdue, list(channel.launches)):
            with rendezvous.use_device(channel.device):
                over = launch.is_done()
            if not over:
                yield launch.started_at, partial(_describe_launch, launch, channel)
                break


def open_channels() -> list[Channel]:
    """Return the channels that exist on this rank."""
    return [channel for each in list(_channels) if (channel := each()) is not None]


def _describe_launch(launch: Launch, channel: Channel) -> str:
    return f"{launch.what} (by {channel.name})"


def _overdue(launch: Launch) -> bool:
    return time.monotonic() - launch.started_at > watchdog.timeout_s


class Channel:
    """Process groups over the ranks of a communicator. Collective: make it on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : torch.device
        The device of all tensors: a GPU for NCCL, the CPU for gloo.

    Raises
    ------
    CommunicatorError
        On every rank, if one of them fails to connect or is not connected in time.
    """

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self.device = device
        self.name = "NCCL" if device.type == "cuda" else "gloo"
        self._groups: dict[str, rendezvous.Backend] = {}
        self.launches: deque[Launch] = deque()
        """Operations that were in flight at the last launch, oldest first."""
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """CUDA graphs that launch operations of this channel: they must be reset before NCCL ends."""
        self._groups, self._server = rendezvous.connect_groups(comm, device, _group, (_MESSAGES, _SUMS))
        _channels[:] = [each for each in _channels if each() is not None] + [weakref.ref(self)]
        watchdog.register_wait_source(_find_overdue_launches)
        _close_all_at_end()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Launch:
        """Launch sends and receives as one group.

        Parameters
        ----------
        sends, receives : sequence of (int, Tensor)
            Peer ranks and contiguous tensors. Keep them until the launch is joined.
        what : str
            The operation, for the watchdog's report.

        Returns
        -------
        Launch
            Call :meth:`join` with it.
        """
        group, grouped = self._group(_MESSAGES), self.device.type == "cuda"
        works: list[Any] = []
        try:
            if grouped:
                # In one group: two ranks that both send first would wait for each other's receive.
                group._start_coalescing()
            try:
                for act, each in ((group.send, sends), (group.recv, receives)):
                    works += [act([_bytes(tensor)], peer, 0) for peer, tensor in each if tensor.nbytes]
            finally:
                if grouped:
                    work = group._end_coalescing()
                    works = [work] if work is not None else []
        except RuntimeError as error:
            raise self._lost(error) from None
        return self.register_launch(works, what)

    def reduce(self, tensor: torch.Tensor, op: MPI.Op, what: str) -> Launch:
        """Launch an all-reduce in place.

        Parameters
        ----------
        tensor : Tensor
            Contiguous.
        op : MPI.Op
            Sum, product, maximum or minimum.
        what : str
            The operation, for the watchdog's report.

        Returns
        -------
        Launch
            Call :meth:`join` with it.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, next(name for each, name in _OPERATIONS if each == op))
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        try:
            work = self._group(_SUMS).allreduce([values.detach()], options)
        except RuntimeError as error:
            raise self._lost(error) from None
        return self.register_launch([work], what)

    def register_launch(self, works: Sequence[Any], what: str) -> Launch:
        """Return a launch of ``works``, and report it to the watchdog unless a graph is being captured.

        Parameters
        ----------
        works : sequence
            Works of torch.distributed.
        what : str
            Name of the communication, for the watchdog.

        Returns
        -------
        Launch
        """
        launch = Launch(time.monotonic(), what, works)
        # A query of CUDA about work would end the capture.
        if self.device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            while self.launches and self.launches[0].is_done():
                self.launches.popleft()
            self.launches.append(launch)
        return launch

    def join(self, launch: Launch) -> None:
        """Make later work on the GPU wait for a launch. The host waits only for gloo.

        Raises
        ------
        CommunicatorError
            If a peer was lost. The channel cannot be used any more.
        """
        try:
            with watchdog.waiting(partial(_describe_launch, launch, self)):
                for work in launch.works:
                    work.wait()
            launch.joined = True
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> CommunicatorError:
        """Abort the process groups, so that the GPU does not wait for lost peers, and return the error to raise."""
        self.launches.clear()
        while self._groups:
            self._groups.popitem()[1].abort()
        return CommunicatorError(f"{self.name}: {rendezvous.first_line(error)}")

    def _group(self, name: str) -> rendezvous.Backend:
        if not self._groups:
            raise RuntimeError("its process groups have ended")
        return self._groups[name]

    def close(self) -> None:
        """Complete all operations and end the process groups. Collective: call on every rank.

        Peers need the groups until the operations are complete.
        """
        # Peers may still wait for these, and cannot complete them without this rank.
        for launch in [each for each in self.launches if not each.joined]:
            self.join(launch)
        self.launches.clear()
        with watchdog.waiting(lambda: f"the end of {self.name}"):
            if self._groups and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            for graph in self.graphs:
                graph.reset()
            while self._groups:
                self._groups.popitem()[1].shutdown()

    def __del__(self) -> None:
        if self._groups and not MPI.Is_finalized():
            self.close()


def _close_all() -> None:
    for channel in open_channels():
        channel.close()


@functools.cache
def _close_all_at_end() -> None:
    endings.call_after_exit_wait(_close_all)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor without gaps, as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _group(store: Any, name: str, comm: MPI.Intracomm, device: torch.device) -> rendezvous.Backend:
    """Return a process group, when all ranks are connected."""
    # torch ends a process whose work lasts longer. Later than the watchdog, whose report names the operation.
    limit = timedelta(seconds=watchdog.timeout_s + 60) if watchdog.timeout_s else timedelta(days=365)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, comm.rank, comm.size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # The layer waits for its halo, but gradients are needed only at the end of the step.
    options.is_high_priority_stream = name == _MESSAGES
    group = dist.ProcessGroupNCCL(store, comm.rank, comm.size, options)
    group.eager_connect_single_device(device)
    return group
