"""The order in which gradients of parameters are reduced: the same on all ranks, whatever order they arrive in.

MPI matches the reductions of two ranks by their order alone, and autograd computes gradients in the order in which this
rank called the layers. A model may call independent branches in a different order on each rank. Therefore contributions
are matched by parameter:

1. Contribution ``k`` to parameter ``i`` in a backward pass has the key ``(i, k)``.
2. The keys of a pass are predicted. The last time that the previous pass occurred, some pass followed it: its keys, in
   the order in which they were reduced, are expected again. So steps that alternate between networks are predicted,
   too. Expected contributions are reduced in that order during the pass, each as soon as it and all those before it
   have arrived. This overlaps with computation.
3. At the end of a pass ranks compare their keys by a digest. A rank that left out a layer is found here.
4. If the pass was not as expected and all ranks had the keys in the same order, the rest is reduced in that order,
   otherwise sorted by key. The result is what later passes expect.

Nothing is expected of a first pass, so its reductions all start at its end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from distconv.communication import agreement
from distconv.communication.derived import CommunicatorRegistry
from distconv.errors import CommunicatorError, MismatchError
from distconv.process import watchdog

Key = tuple[int, int]
"""Number of the parameter in the order of registration, and number of its contribution in this pass.

Ranks that have made models on other communicators count differently: only the order of two numbers is the same on all
ranks.
"""

_REMEMBERED = 64
"""Maximum number of different passes that are stored for a communicator. Then all are dropped, to bound the memory."""

_LISTED = 4
"""Maximum number of parameters that an error lists for each rank."""


@dataclass(eq=False)
class BackwardPass:
    """The keys of a backward pass, in the order in which all ranks reduce them."""

    keys: tuple[Key, ...] = ()
    names: int = 0
    """Digest of the parameters' names, sorted by key."""
    following: BackwardPass | None = None
    """The pass that followed this one the last time."""


class PassHistory:
    """The backward passes over one communicator. All of its ranks have the same history."""

    def __init__(self) -> None:
        self._known: dict[tuple[Key, ...], BackwardPass] = {}
        self._last = BackwardPass()
        self.broken = ""
        """The reason why reductions of ranks no longer match; "" while they match. Then later passes raise."""

    @property
    def expected(self) -> BackwardPass:
        """The pass that is expected to come next; one without keys if nothing is known."""
        return self._last.following or BackwardPass()

    def record(self, keys: Sequence[Key], names: int) -> None:
        """Record that a pass has followed the last one.

        Parameters
        ----------
        keys : sequence of Key
            Its keys in the order in which all ranks reduced them.
        names : int
            Digest of the parameters' names, sorted by key.
        """
        # All ranks have the same history, so all of them forget at the same pass. Otherwise their orders would differ.
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        following = self._known.setdefault(tuple(keys), BackwardPass(tuple(keys), names))
        self._last.following = following
        self._last = following

    def confirm(self) -> None:
        """Record that the pass had the expected keys."""
        self._last = self.expected


class Contribution(Protocol):
    """A contribution to the gradient of a parameter."""

    @property
    def leaf(self) -> torch.Tensor:
        """The parameter."""

    @property
    def number(self) -> int:
        """The number of the parameter in the order of registration."""

    @property
    def name(self) -> str:
        """The parameter's name."""


C = TypeVar("C", bound=Contribution)


class OrderedContributions(Generic[C]):
    """The contributions of one backward pass over one communicator, returned in an order that all ranks share.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks over which gradients are summed.

    Raises
    ------
    CommunicatorError
        If an earlier pass ended with reductions that not all ranks have started.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._history = CommunicatorRegistry.get(comm).get_attached(PassHistory)
        if self._history.broken:
            raise CommunicatorError(
                f"backward pass: an earlier one failed after some gradients had been sent ({self._history.broken}). "
                "Make a new process grid and resume from a checkpoint"
            )
        self._expected = self._history.expected.keys
        self._position = 0
        """Number of expected contributions that were returned."""
        self._arrived: dict[Key, str] = {}
        """The keys in the order of arrival, and the names of their parameters."""
        self._waiting: dict[Key, C] = {}
        """Those that have arrived and were not returned yet."""
        self._counts: Counter[int] = Counter()
        """Contributions to each parameter so far."""

    def add(self, contribution: C) -> list[C]:
        """Take a contribution, and return those that can be reduced now.

        Parameters
        ----------
        contribution : Contribution
            A contribution that autograd has computed.

        Returns
        -------
        list of Contribution
            Any number of contributions, also none, in an order that all ranks share.
        """
        number = contribution.number
        key = (number, self._counts[number])
        self._counts[number] += 1
        self._arrived[key] = contribution.name
        self._waiting[key] = contribution
        ready = []
        # A gap holds back all later ones, on every rank: a rank whose contribution is missing cannot start them either.
        while self._position < len(self._expected) and self._expected[self._position] in self._waiting:
            ready.append(self._waiting.pop(self._expected[self._position]))
            self._position += 1
        return ready

    def is_waiting(self, leaf: torch.Tensor) -> bool:
        """Return True if a contribution to ``leaf`` has arrived and was not returned yet."""
        return any(contribution.leaf is leaf for contribution in self._waiting.values())

    def rest(self) -> list[C]:
        """Return the contributions that are left at the end of the pass.

        Collective: call on every rank of the communicator.

        Returns
        -------
        list of Contribution
            In an order that all ranks share.

        Raises
        ------
        MismatchError
            On every rank, if ranks have gradients of different parameters.
        """
        as_expected = self._position == len(self._expected) and not self._waiting
        if as_expected:
            if agreement.level != "off":
                # Ranks with the same names have the same keys, so all are as expected, or none. 0 is in place of the
                # order.
                self._compare(0, self._history.expected.names)
            self._history.confirm()
            return []
        by_key = sorted(self._arrived)
        names = _digest(self._names(by_key))
        position = {key: index for index, key in enumerate(by_key)}
        # The order as positions among the keys, since the numbers of parameters differ between ranks.
        in_order = self._compare(_digest([position[key] for key in self._arrived]), names)
        self._history.record(list(self._arrived) if in_order else by_key, names)
        rest = list(self._waiting.items())
        self._waiting = {}
        return [contribution for _, contribution in (rest if in_order else sorted(rest, key=lambda item: item[0]))]

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return [f"{self._arrived[key]} {key[1]}" for key in keys]

    def _compare(self, order: int, names: int) -> bool:
        """Check that all ranks have the same digest ``names``, and return True if they have the same ``order``, too."""
        # Over a communicator of its own: a rank may be here while another one has started more reductions.
        comm = CommunicatorRegistry.get(self.comm).shared_duplicate(self.comm)
        other_order, other_names = agreement.find_mismatches(
            comm, np.array([order, names]), lambda: "agreement on the order of gradients"
        )
        if other_names:
            with watchdog.waiting(lambda: "agreement on the order of gradients"):
                lists = comm.allgather((self._names(sorted(self._arrived)), self._position))
            text = _describe([listed for listed, _ in lists])
            # Reductions that only some ranks have started can neither be matched nor taken back.
            if any(started for _, started in lists):
                self._history.broken = text
            raise MismatchError(text)
        return not other_order


def _digest(values: Sequence[int] | Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "little")


def _describe(lists: Sequence[Sequence[str]]) -> str:
    """Return the message for ranks whose gradients are not of the same parameters, given the names on each rank."""
    on_all = set.intersection(*map(set, lists))
    extra = []
    for rank, names in enumerate(lists):
        only = list(dict.fromkeys(name.rpartition(" ")[0] for name in names if name not in on_all))
        if only:
            extra.append(f"{', '.join(only[:_LISTED])}{', ...' if len(only) > _LISTED else ''} on rank {rank}")
    return (
        "backward pass: ranks have gradients of different parameters, or use a parameter a different number of times: "
        f"in addition to those of all ranks there are {'; '.join(extra)}. Call the same layers on every rank"
    )
