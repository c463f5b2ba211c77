"""A proxy between a client and an S3 server of ours that counts, changes and swallows."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    """By name in lower case."""
    body: bytes = b""


@dataclass
class Told:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def error(status: int, code: str) -> Told:
    """Refuse as S3 does."""
    body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
    return Told(status, {"content-type": "application/xml"}, body)


class Meddler:
    """
    Pass requests on to *port*, and keep them in *asked*.

    *before* may change a request, or answer in the server's place. *after* may change an
    answer, or say None: then the client hears nothing and is cut off.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.asked: list[Asked] = []
        self.before: Callable[[Asked], Told | None] = lambda asked: None
        self.after: Callable[[Asked, Told], Told | None] = lambda asked, told: told
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_port

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def methods(self) -> list[str]:
        """Give the methods of what was asked, and start anew."""
        asked, self.asked = self.asked, []
        return [one.method for one in asked]

    def pass_on(self, asked: Asked) -> Told:
        """Ask the server itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self._to, timeout=10)
        try:
            connection.request(asked.method, asked.path, asked.body, asked.headers)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Told(answer.status, headers, answer.read())
        finally:
            connection.close()

    @contextmanager
    def started(self) -> Iterator["Meddler"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        meddler = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, body)
                meddler.asked.append(asked)
                told = meddler.before(asked)
                if told is None:
                    told = meddler.after(asked, meddler.pass_on(asked))
                if told is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response_only(told.status)
                for name, value in told.headers.items():
                    if name not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(told.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(told.body)

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = handle_any  # noqa: N815

            def log_message(self, *told: object) -> None:
                pass

        return Handler
