"""Registry of the communicators derived from another one, which frees those that no rank uses any more.

MPI offers about two thousand communicators. Freeing one is collective, but Python drops an object at a different time
on each rank. Therefore nothing is freed when an object is dropped: the ranks compare what they have dropped when they
next call :meth:`CommunicatorRegistry.free_unused`, and free what all of them have dropped.

The registry is an attribute of the MPI communicator, so all Python objects of one communicator find the same registry.
Process grids and pipelines use it. It does not depend on them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from distconv.process import watchdog

T = TypeVar("T")

COLLECT_ABOVE = 64
"""Number of communicators above which the garbage collector runs before a search for unused ones.

A communicator in a reference cycle is dropped only by the garbage collector.
"""


class _Entry(NamedTuple):
    comm: MPI.Intracomm
    """A second handle, with which the communicator can be freed after the object in use was dropped."""
    in_use: weakref.ref[MPI.Intracomm]
    """The object in use. The reference is dead on a rank that has dropped it."""


class CommunicatorRegistry:
    """The communicators derived from one, in the order in which all of its ranks made them."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._collect_above = COLLECT_ABOVE
        self._attached: dict[type[Any], Any] = {}
        self._shared_duplicate: MPI.Intracomm | None = None
        self.backward_passes = 0
        """Number of backward passes that have reduced gradients over the communicator; the same on all of its ranks."""

    @staticmethod
    def get(comm: MPI.Intracomm) -> CommunicatorRegistry:
        """Return the registry of a communicator; make it at first use.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator, or a duplicate of it that :meth:`duplicate` made.

        Returns
        -------
        CommunicatorRegistry
            The same object for ``comm`` and its duplicates.
        """
        registry = comm.Get_attr(_registry_key())
        # MPI returns None for an attribute that was never set.
        if not isinstance(registry, CommunicatorRegistry):
            registry = CommunicatorRegistry()
            comm.Set_attr(_registry_key(), registry)
        return registry

    @staticmethod
    def comparison_comm(comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return the duplicate that :meth:`shared_duplicate` made for the ranks of ``comm``, or else ``comm`` itself.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator.

        Returns
        -------
        MPI.Intracomm
            A communicator over the same ranks.
        """
        registry = comm.Get_attr(_registry_key())
        return (registry._shared_duplicate if isinstance(registry, CommunicatorRegistry) else None) or comm

    def get_attached(self, kind: type[T]) -> T:
        """Return the object of a class that is attached to these communicators; make it at first use.

        Parameters
        ----------
        kind : type
            The class, which is called without arguments.

        Returns
        -------
        T
            The same object in each call.
        """
        if kind not in self._attached:
            self._attached[kind] = kind()
        found: T = self._attached[kind]
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return a registered duplicate of a communicator. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator.

        Returns
        -------
        MPI.Intracomm
            The duplicate. Its registry is this one.
        """
        duplicate = self._register(comm.Dup())
        # The duplicate has the same registry, so a grid over it shares the communicators and the count of passes.
        duplicate.Set_attr(_registry_key(), self)
        return duplicate

    def shared_duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return one duplicate of a communicator that all callers share. Collective at its first use.

        Comparisons go over it, since other collectives may be in flight over ``comm`` on some ranks.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator.

        Returns
        -------
        MPI.Intracomm
            The duplicate, which is freed with ``comm``.
        """
        if self._shared_duplicate is None:
            self._shared_duplicate = comm.Dup()
        return self._shared_duplicate

    def split(self, comm: MPI.Intracomm, color: int, key: int) -> MPI.Intracomm:
        """Split a communicator and register this rank's part. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator.
        color, key : int
            As in ``MPI.Comm.Split``.

        Returns
        -------
        MPI.Intracomm
            The communicator of the ranks with the same ``color``.
        """
        return self._register(MPI.Intracomm(comm.Split(color, key)))

    def _register(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        # Without a second handle, a rank that has dropped the object could not take part in the collective Free.
        self._entries.append(_Entry(MPI.Intracomm(comm), weakref.ref(comm)))
        comm.Set_attr(_state_key(), CommunicatorState(next(_creation_numbers)))
        return comm

    def free(self, comm: MPI.Intracomm) -> None:
        """Free a communicator, even one in use. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator. One that was freed before is left alone.
        """
        if comm:
            self._entries = [entry for entry in self._entries if entry.comm != comm]
            self._free(comm)

    def _free(self, comm: MPI.Intracomm) -> None:
        # A duplicate of the communicator from which all are derived has this registry, too, and must not free its
        # shared duplicate.
        own = comm.Get_attr(_registry_key())
        if isinstance(own, CommunicatorRegistry) and own is not self and own._shared_duplicate is not None:
            own._shared_duplicate.Free()
        comm.Free()

    def free_unused(self, comm: MPI.Intracomm) -> None:
        """Free the communicators that no rank uses any more. Collective: call on every rank.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator from which all are derived.
        """
        if len(self) > self._collect_above:
            gc.collect()
        # All ranks made the same communicators in the same order, so entry i is the same one on all of them.
        dropped = np.array([entry.in_use() is None for entry in self._entries], dtype=np.uint8)
        with watchdog.waiting(lambda: "freeing communicators that no rank uses"):
            # MIN: 1 only where all ranks have dropped it. A rank that still uses one keeps it alive on all.
            comm.Allreduce(MPI.IN_PLACE, dropped, MPI.MIN)
            # In the order of creation on every rank, since Free is collective.
            for entry, dropped_by_all in zip(self._entries, dropped, strict=True):
                if dropped_by_all:
                    self._free(entry.comm)
        self._entries = [entry for entry in self._entries if entry.comm]
        # Where many are really in use, collecting garbage at each call would only cost time.
        self._collect_above = (
            max(COLLECT_ABOVE, 2 * len(self)) if len(self) > self._collect_above else self._collect_above
        )


@functools.cache
def _registry_key() -> int:
    """Return MPI's key of the attribute that holds the registry. MPI must be running at the first call."""
    return MPI.Comm.Create_keyval()


_creation_numbers = itertools.count()


@dataclass
class CommunicatorState:
    """State of one communicator that its duplicates do not share."""

    number: int = -1
    """Position in the order of creation, by which ranks sort the communicators that they share.

    The numbers themselves may differ between ranks.
    """
    operations: int = 0
    """Number of operations over it whose order has been compared; the same on all of its ranks."""

    @staticmethod
    def get(comm: MPI.Intracomm) -> CommunicatorState:
        """Return the state of a communicator; make it at first use.

        Parameters
        ----------
        comm : MPI.Intracomm
            The communicator.

        Returns
        -------
        CommunicatorState
            The same object in each call.
        """
        state = comm.Get_attr(_state_key())
        if not isinstance(state, CommunicatorState):
            state = CommunicatorState()
            comm.Set_attr(_state_key(), state)
        return state


@functools.cache
def _state_key() -> int:
    return MPI.Comm.Create_keyval()


def creation_order(comm: MPI.Intracomm) -> int:
    """Return a number by which ranks sort the communicators that they share in the same way.

    Making a communicator is collective, so its ranks have made those that they share in the same order.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator that a registry made.

    Returns
    -------
    int
        The sort key. Only comparisons of two keys on one rank are meaningful.
    """
    return CommunicatorState.get(comm).number
