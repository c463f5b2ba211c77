"""
A server that plays Genesys Cloud: the login host and the API, at one address.

It knows the conversations it is told, one OAuth client, and the tokens it has given out; it keeps
what it was asked. What a test sets on it happens from the next request on.
"""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

CLIENT_ID = "5a1c8f00-0000-4000-8000-00000000c11e"
CLIENT_SECRET = "gen3sys-s3cret-of-a-client"

_tokens = count(1)


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Genesys:
    """What it knows, what it was asked, and how it behaves."""

    url: str = ""
    conversations: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    """Those that it does not show to this client."""
    asked: list[str] = field(default_factory=list)
    """Paths of look-ups, in order."""
    asked_at: list[float] = field(default_factory=list)
    logins: int = 0
    tokens: dict[str, float] = field(default_factory=dict)
    """Those that are good, and until when."""
    expires_in: float = 86400
    told_life: object = ...
    """What a login says of that, if not the truth."""
    status: int = 0
    """What every look-up is answered with, instead of the truth."""
    login_status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with *status*."""
    body: bytes | None = None
    """Sent with *status* instead of an error of Genesys' own."""
    answering: threading.Event = field(default_factory=_set)
    """While it is not set, look-ups are noted and not answered."""
    delay: float = 0.0
    login_delay: float = 0.0
    hangs_up: bool = False
    """Close connections without an answer."""
    refuses: int = 0
    """How many more look-ups are answered 401, whatever the token."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def known(self) -> list[str]:
        """Give the conversations that were asked for."""
        return [path.rpartition("/")[2] for path in self.asked]

    def revoke(self) -> None:
        """Take no token any more that was given out up to now."""
        self.tokens.clear()

    def settings(self, **more: str) -> dict[str, str]:
        """Give what a configuration has to say to ask here."""
        return {
            "verify": "genesys",
            "genesys.region": self.url,
            "genesys.client_id": CLIENT_ID,
            "genesys.client_secret": CLIENT_SECRET,
            **{f"genesys.{name}": value for name, value in more.items()},
        }


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet, which nobody delays
    genesys: Genesys

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        genesys = self.genesys
        with genesys.lock:
            genesys.logins += 1
        time.sleep(genesys.login_delay)
        if genesys.hangs_up:
            self.close_connection = True
            return
        both = f"{CLIENT_ID}:{CLIENT_SECRET}".encode()
        is_client = self.headers["Authorization"] == f"Basic {base64.b64encode(both).decode()}"
        if genesys.login_status:
            self._say(genesys.login_status, {"message": "no"}, genesys.headers)
        elif self.path.endswith("/oauth/token") and is_client and _asks_for_token(body, self):
            token = f"t0ken-of-genesys-{next(_tokens)}"
            genesys.tokens[token] = time.monotonic() + genesys.expires_in
            self._say(
                200,
                {
                    "access_token": token,
                    "token_type": "bearer",
                    "expires_in": (
                        genesys.expires_in if genesys.told_life is ... else genesys.told_life
                    ),
                },
            )
        else:
            self._say(401, {"error": "invalid_client", "description": "client not found"})

    def do_GET(self) -> None:
        genesys = self.genesys
        with genesys.lock:
            genesys.asked.append(self.path)
            genesys.asked_at.append(time.monotonic())
            is_refused = genesys.refuses > 0
            genesys.refuses -= is_refused
        time.sleep(genesys.delay)
        genesys.answering.wait(30)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        name = self.path.rpartition("/api/v2/conversations/")[2]
        if genesys.hangs_up:
            self.close_connection = True
        elif genesys.status:
            said = {"status": genesys.status, "code": "trouble", "message": "as told"}
            self._say(genesys.status, said, genesys.headers, genesys.body)
        elif is_refused or genesys.tokens.get(token, 0) < time.monotonic():
            self._say(401, {"status": 401, "code": "bad.credentials", "message": "Invalid login"})
        elif name in genesys.hidden:
            said = {"status": 403, "code": "missing.permissions", "message": "not in a division"}
            self._say(403, said)
        elif name in genesys.conversations:
            self._say(200, {"id": name, "participants": []})
        else:
            self._say(404, {"status": 404, "code": "not.found", "message": "no such conversation"})

    def _say(
        self,
        status: int,
        said: dict[str, object],
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        text = json.dumps(said).encode() if body is None else body
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None: ...


def _asks_for_token(body: bytes, request: BaseHTTPRequestHandler) -> bool:
    form = request.headers["Content-Type"] == "application/x-www-form-urlencoded"
    return form and body == b"grant_type=client_credentials"


@contextmanager
def playing_genesys(*conversations: str) -> Iterator[Genesys]:
    """Play Genesys, with these conversations in it."""
    genesys = Genesys(conversations=set(conversations))
    handler = type("Requests", (_Requests,), {"genesys": genesys})

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args: object) -> None: ...  # whoever asks may leave

    with Server(("127.0.0.1", 0), handler) as server:
        genesys.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield genesys
        finally:
            genesys.answering.set()
            server.shutdown()
            thread.join()
