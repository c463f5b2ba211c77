"""
One process of several that race for the same objects; tells as JSON what it did.

    python s3_racer.py PORT NAME THREADS ROUNDS TASK PATH...

It says `ready`, waits for a line, and then all threads go at once. Nothing here but the
standard library: what is on trial is the server, not a client.
"""

import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

LOST = (404, 409, 412)


class Racer:
    """One thread with a connection of its own."""

    def __init__(self, port: int, name: str, rounds: int, paths: list[str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.name = name
        self.rounds = rounds
        self.paths = paths
        self.won: list[tuple[str, str]] = []
        """Which object, and what stood there before."""
        self.unseen = 0
        """How often a read did not show what this thread had written before it."""

    def create(self) -> None:
        """Create each object, unless it is there."""
        for path in self.paths:
            status, _, _ = self._ask("PUT", path, self.name.encode(), {"If-None-Match": "*"})
            if _is_won(status):
                self.won.append((path, ""))

    def count(self) -> None:
        """Raise the number in each object *rounds* times."""
        for path in [path for _ in range(self.rounds) for path in self.paths]:
            while not self._raise(path):
                pass

    def remove(self) -> None:
        """Remove each object as it was read, if it still is that."""
        for path in self.paths:
            status, etag, body = self._ask("GET", path)
            if status == 200:
                status, _, _ = self._ask("DELETE", path, headers={"If-Match": etag})
                if _is_won(status):
                    self.won.append((path, body.decode()))

    def churn(self) -> None:
        """Take each object, where it is free, and free it again, *rounds* times."""
        for path in [path for _ in range(self.rounds) for path in self.paths]:
            while True:
                status, etag, _ = self._ask("PUT", path, self.name.encode(), {"If-None-Match": "*"})
                if _is_won(status):
                    break
            _, _, body = self._ask("GET", path)
            self.unseen += body != self.name.encode()
            status, _, _ = self._ask("DELETE", path, headers={"If-Match": etag})
            self.unseen += not _is_won(status)
            self.won.append((path, ""))

    def _raise(self, path: str) -> bool:
        _, etag, body = self._ask("GET", path)
        status, _, _ = self._ask("PUT", path, b"%d" % (int(body) + 1), {"If-Match": etag})
        if not _is_won(status):
            return False
        self.won.append((path, body.decode()))
        _, _, seen = self._ask("GET", path)
        self.unseen += int(seen) <= int(body)
        return True

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, str, bytes]:
        self._connection.request(method, path, body, headers or {})
        answer = self._connection.getresponse()
        return answer.status, answer.getheader("ETag", ""), answer.read()


def _is_won(status: int) -> bool:
    if status in LOST:
        return False
    if status in (200, 204):
        return True
    raise RuntimeError(f"unexpected status {status}")


def _run(racer: Racer, task: str, start: threading.Event, failures: list[str]) -> None:
    start.wait()
    work: Callable[[], None] = getattr(racer, task)
    try:
        work()
    except Exception as error:  # noqa: BLE001 - told to the one who judges
        failures.append(f"{racer.name}: {type(error).__name__}: {error}")


def main(port: str, name: str, threads: str, rounds: str, task: str, *paths: str) -> None:
    racers = [
        Racer(int(port), f"{name}.{at}", int(rounds), list(paths)) for at in range(int(threads))
    ]
    start = threading.Event()
    failures: list[str] = []
    runs = [
        threading.Thread(target=_run, args=(racer, task, start, failures), daemon=True)
        for racer in racers
    ]
    for run in runs:
        run.start()
    print("ready", flush=True)
    sys.stdin.readline()
    start.set()
    for run in runs:
        run.join()
    told: Iterator[dict[str, Any]] = (
        {"name": racer.name, "won": racer.won, "unseen": racer.unseen} for racer in racers
    )
    print(json.dumps({"racers": list(told), "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
