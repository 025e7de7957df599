"""Reading by several processes per rank: HDF5 has one lock in each process, and Python computes in one thread.

They are children of one process that has neither MPI nor threads (``reader_server``), since forking a rank would copy
its MPI state. They end with the rank, whose sockets close then.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.data.address import Location
from distconv.data.coordinates import VariableLabels
from distconv.data.formats import reader_server
from distconv.data.formats.reader_server import receive_into, receive_message, send_message
from distconv.data.formats.store import Store
from distconv.data.source import SampleSource
from distconv.deprecation import former_names
from distconv.distribution import Box
from distconv.errors import DataError
from distconv.process.launchers import environment_without_launcher

if TYPE_CHECKING:
    from typing_extensions import Self

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class PicklableSource(SampleSource, Protocol):
    """A source whose boxes another process can read: files, or a function that the other process can import."""

    store: Any
    """Object whose ``read(name, slices)`` reads boxes; it is pickled and sent to the other process."""


class ReadByProcesses:
    """A source whose boxes several processes of each rank read at the same time.

    Collective: construct on every rank.

    Parameters
    ----------
    source : PicklableSource
        A result of :func:`open_source`, or a :class:`BoxFunction` whose function is in a module that does not import
        distconv: there is no MPI in the reading processes.
    readers : int
        Number of processes on each rank.

    Raises
    ------
    DataError
        On all ranks, if the source cannot be read in another process.
    """

    def __init__(self, source: PicklableSource, readers: int) -> None:
        self.source, self.readers = source, readers
        self.path, self.comm = source.path, source.comm
        check_same_on_all_ranks(self.comm, "reading processes", str(readers))
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._links: list[socket.socket] = []
        try:
            # On all ranks: the start of a process may fail on one of them.
            try_on_all_ranks(self.comm, self._start, DataError)
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        if self.readers < 1:
            raise DataError(f"{self.path}: {self.readers} reading processes; ask for at least one")
        store = getattr(self.source, "store", None)
        pickled = _pickle_store(self.path, store)
        pairs = [socket.socketpair() for _ in range(self.readers)]
        self._links = [ours for ours, _ in pairs]
        theirs = [link.fileno() for _, link in pairs]
        # -I: neither the folder of that module nor PYTHON variables are on its path. The rank sends its own path.
        command = [sys.executable, "-I", reader_server.__file__, *map(str, theirs)]
        try:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=theirs,
                env=environment_without_launcher() | _ONE_THREAD,
                start_new_session=True,  # Ctrl-C reaches the ranks alone; the readers end after them
            )
        finally:
            # The children have these ends. A copy in this process would hide that a child has ended.
            for _, link in pairs:
                link.close()
        modules = [type(store).__module__, *getattr(store, "libraries", ())]
        send_message(self._links[0], json.dumps({"path": [os.getcwd(), *sys.path], "modules": modules}).encode())
        send_message(self._links[0], pickled)
        # Each child reports once that it has opened the samples.
        for link in self._links:
            if error := self._answer(link).get("error"):
                raise DataError(error)
            self._free.put(link)

    def _answer(self, link: socket.socket) -> dict[str, Any]:
        """Return the header of the next answer of a reading process.

        Raises
        ------
        DataError
            If the process has ended.
        """
        try:
            text = receive_message(link)
        except OSError:
            text = None
        if text is None:
            raise DataError(self._ended())
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _ended(self) -> str:
        return f"{self.path}: a reading process has ended; look for the reason above, and start again"

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Return the values in ``box``, read by an idle process. Not collective; may run in another thread.

        Parameters
        ----------
        name : str
            Name of the dataset.
        box : Box
            Global indices, samples first.

        Returns
        -------
        ndarray

        Raises
        ------
        DataError
            On this rank, if they cannot be read.
        """
        # Waits until a process is idle: there may be more threads than processes.
        link = self._free.get()
        in_step = False
        try:
            send_message(link, json.dumps([name, [[i.start, i.stop] for i in box]]).encode())
            answer = self._answer(link)
            if "error" not in answer:
                values: NDArray[Any] = np.empty(answer["shape"], np.dtype(answer["dtype"]))
                if values.size and not receive_into(link, values.reshape(-1).view(np.uint8).data):
                    raise DataError(self._ended())
            in_step = True
        except OSError as error:
            raise DataError(self._ended()) from error
        finally:
            if not in_step:  # the rest of this answer would be taken for the answer to the next request
                link.close()
            self._free.put(link)
        if "error" in answer:
            raise DataError(answer["error"])
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a dataset, samples first."""
        return self.source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a dataset's values as :meth:`read` returns them.

        float32 if the source has no method ``dtype``. Collective if the source is a :class:`BoxFunction`.
        """
        known = getattr(self.source, "dtype", None)
        return np.dtype("f4") if known is None else known(name)

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dataset's chunks."""
        return self.source.chunks(name)

    def check_unchanged(self) -> None:
        """Raise DataError on all ranks if the data have changed since they were opened. Collective."""
        self.source.check_unchanged()

    def warn_of_large_chunks(self, name: str, block: tuple[int, ...]) -> None:
        """Warn if reading ``block`` of a sample reads much more than that.

        Parameters
        ----------
        name : str
            Name of the dataset.
        block : tuple of int
            Shape that a rank reads, without the sample dimension.
        """
        self.source.warn_of_large_chunks(name, block)

    def attribute(self, name: str, group: str = "/") -> object:
        """Return an attribute of the files or of a group, or None if it is missing.

        Parameters
        ----------
        name : str
            Name of the attribute.
        group : str, optional
            Path of the group (default: the file itself).

        Returns
        -------
        object
        """
        store = self.source.store
        return store.attribute(name, group) if isinstance(store, Store) else None

    def column(self, name: str) -> list[object] | None:
        """Return a small dataset with one value per sample, or None if it is missing. Collective."""
        store = self.source.store
        return try_on_all_ranks(self.comm, lambda: store.column(name), DataError) if isinstance(store, Store) else None

    @property
    def files(self) -> Sequence[Location]:
        """Location of each file, or group, whose samples follow one another."""
        return [path for _, path in self.source.store.parts] if isinstance(self.source.store, Store) else [self.path]

    def labels(self, name: str) -> VariableLabels:
        """Return the dimensions, coordinates and attributes of a dataset. Collective: call on every rank."""
        known = getattr(self.source, "labels", None)
        return VariableLabels() if known is None else known(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of this rank, and close the source."""
        self._stop()
        self.source.close()

    def _stop(self) -> None:
        while self._links:
            self._links.pop().close()
        # Only once, also if __init__ has failed.
        server = self.__dict__.pop("_server", None)
        if server is not None:
            server.wait()


def _pickle_store(path: Location, store: Any) -> bytes:
    """Pickle what reads the boxes; raise DataError if another process could not import it."""
    function = getattr(store, "function", None)
    if store is None:
        raise DataError(f"{path}: cannot be read in another process")
    if getattr(function, "__module__", None) == "__main__":
        raise DataError(
            f"{path}: reading processes cannot import the script that is running; put the function into a module of "
            "its own, which does not import distconv"
        )
    try:
        return pickle.dumps(store)
    except Exception as error:
        raise DataError(
            f"{path}: cannot be sent to reading processes ({type(error).__name__}: {error}); let it be a function of "
            "a module"
        ) from error


__getattr__ = former_names(__name__, {"Portable": "PicklableSource"})
