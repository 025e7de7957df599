"""The messages between a rank and its reading processes, without any process."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import numpy as np

from distconv.data.formats.reader_server import message, received, send, serve
from distconv.data.formats.store import Computed


def test_messages_arrive_whole_and_the_end_is_none() -> None:
    one, other = socket.socketpair()
    text = bytes(range(256)) * 4000
    writer = threading.Thread(target=lambda: (send(one, text), send(one, b""), one.close()))
    writer.start()
    assert message(other) == text and message(other) == b"" and message(other) is None
    writer.join()
    other.close()


def test_a_message_that_was_cut_off_is_none() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\0" * 7 + b"\x05abc")
    one.close()
    assert message(other) is None
    other.close()


def test_values_follow_their_shape_and_errors_are_told() -> None:
    one, other = socket.socketpair()
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4).swapaxes(0, 2)
    store = Computed(Path("values"), lambda name, box: values if name == "x" else 1 / 0)
    server = threading.Thread(target=serve, args=(other, store))
    server.start()
    send(one, json.dumps(["x", [[0, 4], [0, 3], [0, 2]]]).encode())
    answer = json.loads(message(one) or b"")
    assert answer == {"shape": [4, 3, 2], "dtype": "<i2"}
    got = np.empty((4, 3, 2), np.int16)
    assert received(one, got.reshape(-1).view(np.uint8).data) and np.array_equal(got, values)
    send(one, json.dumps(["y", [[0, 1]]]).encode())
    assert "ZeroDivisionError" in json.loads(message(one) or b"")["error"]
    one.close()
    server.join()
    other.close()
