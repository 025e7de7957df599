"""A folder over HTTP from a thread of this process, as servers of data give parts of files."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Handler(http.server.SimpleHTTPRequestHandler):
    """Notes what it sends: the name of a file, and how many bytes."""

    protocol_version = "HTTP/1.1"
    ranges = True
    gone = False
    sent: list[tuple[str, int]]

    def do_GET(self) -> None:
        if self.gone:  # the client has kept its connection
            self.close_connection = True
            return None
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return super().do_GET()
        content = path.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        body = content[int(part[1]) : int(part[2]) + 1] if part else content
        self.sent.append((path.name, len(body)))
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {part[1]}-{part[2]}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        if not self.ranges:
            self.send_header("Accept-Ranges", "none")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, *, ranges: bool = True) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The address of the folder, and what was sent."""
    sent: list[tuple[str, int]] = []
    handler: Any = type("Handler", (Handler,), {"sent": sent, "ranges": ranges})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        handler.gone = True
        server.shutdown()
        thread.join()
        server.server_close()
