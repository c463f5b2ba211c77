"""
What the end-to-end tests stand between: a receiver that counts, and the real command.

`receiving` is a web server of another make than ours. `Command` is `oncebridge run` in a
process of its own; its log is JSON, as it is wherever there is no terminal.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


def event(number, **more):
    envelope = {
        "version": "0",
        "id": f"0b7d5e30-0000-4000-8000-{number:012d}",
        "detail-type": "Parcel Sent",
        "source": "com.example.post",
        "detail": {"parcel": number},
    }
    return json.dumps({**envelope, **more}).encode()


class Receiver:
    """What has reached the other end, and how it answers."""

    def __init__(self):
        self.bodies = []
        self.keys = []
        self.status = 200
        self.delay = 0.0
        self.open = threading.Event()
        self.open.set()
        self.begun = 0
        self.lock = threading.Lock()
        self.url = ""

    @property
    def repeats(self):
        return [body for body, times in Counter(self.bodies).items() if times > 1]


@contextmanager
def receiving(tls=None, port=0):
    receiver = Receiver()
    connections = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with receiver.lock:
                receiver.begun += 1
            time.sleep(receiver.delay)
            receiver.open.wait(30)
            if receiver.status == 200:
                with receiver.lock:
                    receiver.bodies.append(body)
                    receiver.keys.append(self.headers["Idempotency-Key"])
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args): ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args): ...  # whoever sends may be killed

        def finish_request(self, request, address):
            connections.append(request)
            super().finish_request(request, address)

    with Server(("127.0.0.1", port), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
        if tls is not None:
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
            receiver.url = f"https://elsewhere.example:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.open.set()
            server.shutdown()
            thread.join()
            for connection in connections:
                with suppress(OSError):  # closed before
                    connection.shutdown(socket.SHUT_RDWR)


class Command:
    """One run of the command."""

    def __init__(
        self,
        folder,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        before=(),
        **environment,
    ):
        inherited = {n: v for n, v in os.environ.items() if not n.startswith("ONCEBRIDGE_")}
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "oncebridge", *map(str, arguments)],
            cwd=folder,
            env={**inherited, **environment},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )
        self.said = b""
        self.printed = b""
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._listen, args=(stream, name), daemon=True)
            for stream, name in ((self.process.stderr, "said"), (self.process.stdout, "printed"))
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, stream, name):
        for line in stream:
            with self._changed:
                setattr(self, name, getattr(self, name) + line)
                self._changed.notify_all()

    @property
    def log(self):
        """The lines of its log."""
        lines = [line for line in self.said.splitlines() if line.startswith(b'{"time"')]
        return [json.loads(line) for line in lines]

    def until(self, truth, within=15):
        with self._changed:
            assert self._changed.wait_for(truth, within), self.said.decode()

    def ready(self):
        """Wait until it is, and give the address it listens on."""

        def lines():
            return [line for line in self.log if line["event"] == "oncebridge.ready"]

        self.until(lambda: lines() or self.process.poll() is not None)
        (line,) = lines()
        return line["source"]

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def ended(self, within=20):
        """Wait for its end, and give the exit code."""
        code = self.process.wait(within)
        for thread in self._threads:
            thread.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


def send(url, body, *, timeout=10):
    """Post one body, and give status and answer."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)) as line:
        line.request("POST", parts.path, body, {"Content-Type": "application/json"})
        response = line.getresponse()
        return response.status, json.loads(response.read())


class Senders:
    """Some who bring *bodies*, each until it is taken, wherever the service is just then."""

    def __init__(self, bodies, count=8):
        self.url = ""
        self.verdicts = []
        self._left = list(bodies)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._bring) for _ in range(count)]

    def start(self):
        for thread in self._threads:
            thread.start()

    def join(self, within=30):
        for thread in self._threads:
            thread.join(within)
        self._over.set()

    def _bring(self):
        while True:
            try:
                body = self._left.pop()
            except IndexError:
                return
            while not self._over.is_set() and not self._take(body):
                time.sleep(0.02)

    def _take(self, body):
        try:
            status, said = send(self.url, body)
        except (OSError, http.client.HTTPException):
            return False  # it is away, or going
        assert status in (200, 503)
        if status == 200:
            self.verdicts.append(said["verdict"])
        return status == 200
