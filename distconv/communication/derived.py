"""Communicators derived from another one, which go back to MPI when no rank uses them any more.

MPI has some two thousand. To free one is collective, and each rank's Python drops an object when it likes: so what has
been dropped on all ranks is freed by all of them together, when they next ask.
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

FEW = 64
"""Communicators that may exist before Python is asked to look for dropped ones in cycles."""


class _Made(NamedTuple):
    comm: MPI.Intracomm
    """The communicator once more: MPI's handle outlives the object that is used."""
    used: weakref.ref[MPI.Intracomm]


class Derived:
    """The communicators derived from one, in the order in which all of its ranks made them."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._few = FEW
        self._attached: dict[type[Any], Any] = {}
        self._common: MPI.Intracomm | None = None
        self.backward_passes = 0
        """How many have summed gradients over it: the same number on all of its ranks."""

    @staticmethod
    def of(comm: MPI.Intracomm) -> Derived:
        """Those of ``comm``; what is derived from one of its duplicates made here is among them."""
        derived = comm.Get_attr(_key())
        if not isinstance(derived, Derived):
            derived = Derived()
            comm.Set_attr(_key(), derived)
        return derived

    @staticmethod
    def compared(comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator that :meth:`common` gave for the ranks of ``comm``, or else ``comm`` itself."""
        derived = comm.Get_attr(_key())
        return (derived._common if isinstance(derived, Derived) else None) or comm

    def attached(self, kind: type[T]) -> T:
        """Return the object of class ``kind`` that belongs to these communicators; make it at first use."""
        if kind not in self._attached:
            self._attached[kind] = kind()
        found: T = self._attached[kind]
        return found

    def __len__(self) -> int:
        return len(self._made)

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """A duplicate of ``comm``. Collective."""
        duplicate = self._noted(comm.Dup())
        duplicate.Set_attr(_key(), self)
        return duplicate

    def common(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """One duplicate of ``comm`` that all callers share. Collective at the first call; freed with ``comm``."""
        if self._common is None:
            self._common = comm.Dup()
        return self._common

    def split(self, comm: MPI.Intracomm, colour: int, key: int) -> MPI.Intracomm:
        """``comm.Split(colour, key)``. Collective over all ranks that derive together."""
        return self._noted(MPI.Intracomm(comm.Split(colour, key)))

    def _noted(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        self._made.append(_Made(MPI.Intracomm(comm), weakref.ref(comm)))
        comm.Set_attr(_record_key(), Record(next(_numbers)))
        return comm

    def free(self, comm: MPI.Intracomm) -> None:
        """Free ``comm``, used or not, if it has not been freed. Collective."""
        if comm:
            self._made = [each for each in self._made if each.comm != comm]
            self._free(comm)

    def _free(self, comm: MPI.Intracomm) -> None:
        # Duplicates of the communicator from which all are derived share its entry, and with it what stays.
        own = comm.Get_attr(_key())
        if isinstance(own, Derived) and own is not self and own._common is not None:
            own._common.Free()
        comm.Free()

    def give_back(self, comm: MPI.Intracomm) -> None:
        """Free what no rank uses any more. Collective over ``comm``, from which all are derived."""
        if len(self) > self._few:
            gc.collect()
        dropped = np.array([each.used() is None for each in self._made], dtype=np.uint8)
        with watchdog.waiting(lambda: "freeing communicators that no rank uses"):
            comm.Allreduce(MPI.IN_PLACE, dropped, MPI.MIN)
            for each, everywhere in zip(self._made, dropped, strict=True):
                if everywhere:
                    self._free(each.comm)
        self._made = [each for each in self._made if each.comm]
        self._few = max(FEW, 2 * len(self)) if len(self) > self._few else self._few


@functools.cache
def _key() -> int:
    """MPI's key of the attribute that holds them; made when MPI runs."""
    return MPI.Comm.Create_keyval()


_numbers = itertools.count()


@dataclass
class Record:
    """State of one communicator that its duplicates do not share."""

    number: int = -1
    """Ranks sort the communicators that they share by it. The numbers themselves may differ between ranks."""
    operations: int = 0
    """Operations over it whose order has been compared: the same number on all of its ranks."""

    @staticmethod
    def of(comm: MPI.Intracomm) -> Record:
        """Return the record of ``comm``; make one if it has none."""
        record = comm.Get_attr(_record_key())
        if not isinstance(record, Record):
            record = Record()
            comm.Set_attr(_record_key(), record)
        return record


@functools.cache
def _record_key() -> int:
    return MPI.Comm.Create_keyval()


def creation_order(comm: MPI.Intracomm) -> int:
    """Return a number by which ranks sort the communicators that they share in the same way.

    To make a communicator is collective, so its ranks have made those that they share in the same order.
    """
    return Record.of(comm).number
