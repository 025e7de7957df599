"""NCCL, or gloo between CPUs: messages and sums by torch's process groups; for a GPU's no host waits.

A :class:`Channel` has two: messages go beside sums, each kind one after the other on a stream of its own. So all ranks
have to launch those of a kind in one order. The ranks of a process grid do; the stages of a pipeline do not, and their
messages go through MPI. Between CPUs gloo does the same where it is asked for (``DISTCONV_TRANSPORT=torch``).
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
"""MPI's reductions, and torch's names of them."""

_MESSAGES, _SUMS = "messages", "sums"

_channels: list[weakref.ref[Channel]] = []


@dataclass(eq=False)
class Launch:
    """Work that a channel was given: since when, what for, and torch's handles of it."""

    since: float
    what: str
    works: Sequence[Any]
    joined: bool = False

    def over(self) -> bool:
        """Whether it is done."""
        return all(work.is_completed() for work in self.works)


def available() -> bool:
    """Whether this torch has NCCL, and process groups that can be aborted (2.6 or newer)."""
    return dist.is_available() and dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL, "abort")


def _waited_for() -> Iterator[tuple[float, Callable[[], str]]]:
    """What the watchdog is to know: since when a GPU has had work that it has had for too long.

    It asks from its own thread, whose questions to CUDA would open a context on GPU 0, and end the capture of a graph:
    so CUDA is asked only about what looks as if the job must end.
    """
    for channel in channels():
        if channel.device.type == "cpu":
            continue  # its waits are the host's own, and gloo does not know what is over before
        for launch in itertools.takewhile(_overdue, list(channel.launches)):
            with rendezvous.on(channel.device):
                over = launch.over()
            if not over:
                yield launch.since, partial(_described, launch, channel)
                break


def channels() -> list[Channel]:
    """Those that there are."""
    return [channel for each in list(_channels) if (channel := each()) is not None]


def _described(launch: Launch, channel: Channel) -> str:
    return f"{launch.what} (by {channel.name})"


def _overdue(launch: Launch) -> bool:
    return time.monotonic() - launch.since > watchdog.timeout_s


class Channel:
    """Process groups over the ranks of ``comm``, for tensors of ``device``. Making one is collective.

    Raises
    ------
    CommunicatorError
        On all ranks, with what is said on one of them; also if they are not connected in time.
    """

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self.device = device
        self.name = "NCCL" if device.type == "cuda" else "gloo"
        self._groups: dict[str, rendezvous.Backend] = {}
        self.launches: deque[Launch] = deque()
        """What was not over yet at the last launch, oldest first."""
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """Graphs that launch messages or sums of this channel: NCCL does not end before they do."""
        self._groups, self._server = rendezvous.connected(comm, device, _group, (_MESSAGES, _SUMS))
        _channels[:] = [each for each in _channels if each() is not None] + [weakref.ref(self)]
        watchdog.register_wait_source(_waited_for)
        _close_all_at_end()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> Launch:
        """Launch messages that all go at once. Keep the tensors until they are joined."""
        group, grouped = self._group(_MESSAGES), self.device.type == "cuda"
        works: list[Any] = []
        try:
            if grouped:
                group._start_coalescing()
            try:
                for act, each in ((group.send, sends), (group.recv, receives)):
                    works += [act([_bytes(tensor)], peer, 0) for peer, tensor in each if tensor.nbytes]
            finally:
                if grouped:
                    together = group._end_coalescing()
                    works = [together] if together is not None else []
        except RuntimeError as error:
            raise self._lost(error) from None
        return self.launched(works, what)

    def reduce(self, tensor: torch.Tensor, op: MPI.Op, what: str) -> Launch:
        """Launch the reduction of ``tensor`` (contiguous) in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, next(name for each, name in _OPERATIONS if each == op))
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        try:
            work = self._group(_SUMS).allreduce([values.detach()], options)
        except RuntimeError as error:
            raise self._lost(error) from None
        return self.launched([work], what)

    def launched(self, works: Sequence[Any], what: str) -> Launch:
        """Let the watchdog know of ``works``; but while a graph is captured, in which nothing is under way yet."""
        launch = Launch(time.monotonic(), what, works)
        # To ask CUDA about work would end the capture.
        if self.device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            while self.launches and self.launches[0].over():
                self.launches.popleft()
            self.launches.append(launch)
        return launch

    def join(self, launch: Launch) -> None:
        """Make what is launched from here on wait for ``launch``; the host does not, but on the CPU.

        Raises
        ------
        CommunicatorError
            If a peer was lost; the channel is of no use any more.
        """
        try:
            with watchdog.waiting(partial(_described, launch, self)):
                for work in launch.works:
                    work.wait()
            launch.joined = True
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> CommunicatorError:
        """What to raise. The GPU goes on without the peers."""
        self.launches.clear()
        while self._groups:
            self._groups.popitem()[1].abort()
        return CommunicatorError(f"{self.name}: {rendezvous.first_line(error)}")

    def _group(self, name: str) -> rendezvous.Backend:
        if not self._groups:
            raise RuntimeError("its process groups have ended")
        return self._groups[name]

    def close(self) -> None:
        """End the process groups, when all is done that this rank launched: its peers need them until then.

        Collective, in that it may wait for the other ranks to do the same.
        """
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
    for channel in channels():
        channel.close()


@functools.cache
def _close_all_at_end() -> None:
    endings.call_after_exit_wait(_close_all)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor``, which has no gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _group(store: Any, name: str, comm: MPI.Intracomm, device: torch.device) -> rendezvous.Backend:
    """A process group; waits for those of the other ranks."""
    # Torch ends a process whose work lasts longer: behind the watchdog, which says what for.
    limit = timedelta(seconds=watchdog.timeout_s + 60) if watchdog.timeout_s else timedelta(days=365)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, comm.rank, comm.size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # A halo is waited for at once, a sum of gradients at the end of the step.
    options.is_high_priority_stream = name == _MESSAGES
    group = dist.ProcessGroupNCCL(store, comm.rank, comm.size, options)
    group.eager_connect_single_device(device)
    return group
