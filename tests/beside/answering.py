"""HTTP servers of a test, beside it in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Answers(BaseHTTPRequestHandler):
    """A handler's base: says nothing on stderr."""

    def asked(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers["content-length"]))

    def answer(self, body: str, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[Answers]) -> Iterator[str]:
    """The URL of a server. It ends with the context, failed or not: a thread that served on would
    keep the whole run of tests from ending."""
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
