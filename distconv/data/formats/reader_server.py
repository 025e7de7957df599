"""A process without MPI and torch, which reads boxes in its own child processes.

``reading_processes`` runs this module as a script. Importing distconv would start MPI. So ``distconv`` is an empty
package here, below which Python finds the modules of the formats. Messages of the rank are trusted, since the rank
started this process. The length of each message is sent before it::

    start     JSON (the path of modules, and which to import), then the pickled store; over the first socket only
    ready     JSON: empty, or the error; from each child, over its own socket
    request   JSON: dataset and box
    answer    JSON (shape and dtype, or the error), then the values without a length
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import socket
import struct
import sys
import types
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("!Q")


def receive_into(link: socket.socket, into: memoryview) -> bool:
    """Fill a buffer from a socket.

    Parameters
    ----------
    link : socket.socket
        The connection.
    into : memoryview
        The buffer, of bytes.

    Returns
    -------
    bool
        False if the other side has closed the connection. Otherwise True.
    """
    while into:
        count = link.recv_into(into)
        if not count:
            return False
        into = into[count:]
    return True


def receive_message(link: socket.socket) -> bytes | None:
    """Return the next message; None if the other side has closed the connection."""
    length = bytearray(_LENGTH.size)
    if not receive_into(link, memoryview(length)):
        return None
    text = bytearray(_LENGTH.unpack(length)[0])
    return bytes(text) if receive_into(link, memoryview(text)) else None


def send_message(link: socket.socket, text: bytes) -> None:
    """Send a message, after its length.

    Parameters
    ----------
    link : socket.socket
        The connection.
    text : bytes
        The message.
    """
    link.sendall(_LENGTH.pack(len(text)) + text)


def serve(link: socket.socket, store: Any) -> None:
    """Answer requests until the rank closes the connection. An error of a read is the answer to its request.

    Parameters
    ----------
    link : socket.socket
        The connection to the rank.
    store : Store
        Reads the boxes.
    """
    while (request := receive_message(link)) is not None:
        name, box = json.loads(request)
        try:
            values = store.read(name, tuple(slice(*each) for each in box))
            # The values are sent as one piece of memory.
            if not values.flags.c_contiguous:
                values = values.copy()
            answer = {"shape": values.shape, "dtype": values.dtype.str}
        except Exception as error:
            send_message(link, json.dumps({"error": f"{error}" or type(error).__name__}).encode())
            continue
        send_message(link, json.dumps(answer).encode())
        # An empty array cannot be cast to bytes.
        link.sendall(memoryview(values.reshape(-1)).cast("B") if values.size else b"")


def main(descriptors: list[int]) -> None:
    """Load the store, and fork a child for each descriptor, which is a socket to the rank."""
    links = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    start = receive_message(links[0])
    if start is None:
        return
    folder = Path(__file__).resolve().parents[2]
    settings = json.loads(start)
    # As in the rank: a pickled function must be found in the same module.
    sys.path[:] = settings["path"]
    for name, place in (("distconv", folder), ("distconv.data", folder / "data")):
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    for name in settings["modules"]:
        # Once, before the children are forked. An error is raised again, and reported, when they load the store.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    pickled = receive_message(links[0])
    assert pickled is not None
    children = []
    for index, link in enumerate(links):
        child = os.fork()
        if not child:
            # A copy of another child's socket would keep that connection open after the rank has closed it.
            for other in links[:index] + links[index + 1 :]:
                other.close()
            try:
                _serve_pickled(link, pickled)
            finally:
                # Without the exit handlers and buffers of the parent, of which this is a copy.
                os._exit(0)
        children.append(child)
    # The parent keeps no socket: if a child ends, the rank sees its connection closed.
    for link in links:
        link.close()
    for child in children:
        os.waitpid(child, 0)


def _serve_pickled(link: socket.socket, pickled: bytes) -> None:
    """Open the store in this child, report to the rank that it is ready, and answer requests."""
    try:
        store = pickle.loads(pickled)
    except Exception as error:
        text = f"the samples cannot be opened in another process: {type(error).__name__}: {error}"
        send_message(link, json.dumps({"error": text}).encode())
        return
    send_message(link, json.dumps({}).encode())
    serve(link, store)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
