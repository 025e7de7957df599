"""The messages between a rank and its reading processes, without any process."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import numpy as np

from distconv.data.formats.reader_server import receive_into, receive_message, send_message, serve
from distconv.data.formats.store import FunctionStore


def test_messages_arrive_whole_and_the_end_is_none() -> None:
    one, other = socket.socketpair()
    text = bytes(range(256)) * 4000
    writer = threading.Thread(target=lambda: (send_message(one, text), send_message(one, b""), one.close()))
    writer.start()
    assert receive_message(other) == text and receive_message(other) == b"" and receive_message(other) is None
    writer.join()
    other.close()


def test_a_message_that_was_cut_off_is_none() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\0" * 7 + b"\x05abc")
    one.close()
    assert receive_message(other) is None
    other.close()


def test_values_follow_their_shape_and_errors_are_told() -> None:
    one, other = socket.socketpair()
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4).swapaxes(0, 2)
    store = FunctionStore(Path("values"), lambda name, box: values if name == "x" else 1 / 0)
    server = threading.Thread(target=serve, args=(other, store))
    server.start()
    send_message(one, json.dumps(["x", [[0, 4], [0, 3], [0, 2]]]).encode())
    answer = json.loads(receive_message(one) or b"")
    assert answer == {"shape": [4, 3, 2], "dtype": "<i2"}
    got = np.empty((4, 3, 2), np.int16)
    assert receive_into(one, got.reshape(-1).view(np.uint8).data) and np.array_equal(got, values)
    send_message(one, json.dumps(["y", [[0, 1]]]).encode())
    assert "ZeroDivisionError" in json.loads(receive_message(one) or b"")["error"]
    one.close()
    server.join()
    other.close()
