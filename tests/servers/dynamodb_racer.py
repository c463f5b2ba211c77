"""
One process of several that race for the same items; tells as JSON what it won.

    python dynamodb_racer.py PORT TABLE NAME THREADS TASK KEY...

It says `ready`, waits for a line, and then all threads go at once. Nothing here but the
standard library: what is on trial is the server, not a client.
"""

import base64
import http.client
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

_LOST = ("DuplicateItem", "ConditionalCheckFailed", "TransactionConflict")
_BATCH = 5


class Racer:
    """One thread with a connection of its own."""

    def __init__(self, port: int, table: str, name: str, keys: list[str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._table = table
        self.name = name
        self.keys = keys
        self.won: list[tuple[str, str]] = []
        """Which item, and what stood there before."""

    def insert(self) -> None:
        """Insert each item by a statement, several in a request."""
        text = f"INSERT INTO \"{self._table}\" VALUE {{'k': ?, 'r': ?}}"
        self._execute([(key, "", text, (_b(key), _b(self.name))) for key in self.keys])

    def put(self) -> None:
        """Put each item, unless it is there."""
        for key in self.keys:
            put = self._put(key, {"ConditionExpression": "attribute_not_exists(k)"})
            self._judge(key, "", *self._ask("PutItem", put))

    def pair(self) -> None:
        """Put each item together with its neighbour, unless one of them is there."""
        condition = {"ConditionExpression": "attribute_not_exists(k)"}
        for first, second in zip(self.keys[::2], self.keys[1::2], strict=True):
            puts = [{"Put": self._put(key, condition)} for key in (first, second)]
            status, answer = self._ask("TransactWriteItems", {"TransactItems": puts})
            self._judge(first, "", status, answer)

    def count(self) -> None:
        """Raise the number in each item by a statement that says what it was."""
        for key in self.keys:
            while not self._raise(key):
                pass

    def remove(self) -> None:
        """Remove each item as it was read, if it still is that."""
        for key in self.keys:
            before = self._read(key)
            if before:
                asked = {
                    "TableName": self._table,
                    "Key": {"k": _b(key)},
                    "ConditionExpression": "r = :r",
                    "ExpressionAttributeValues": {":r": _b(before)},
                }
                self._judge(key, before, *self._ask("DeleteItem", asked))

    def _raise(self, key: str) -> int:
        text = f'UPDATE "{self._table}" SET r = ?, x = ? WHERE k = ? AND r = ?'
        before = self._read(key)
        values = (_b(str(int(before) + 1)), {"N": "1"}, _b(key), _b(before))
        return self._execute([(key, before, text, values)])

    def _execute(self, asked: list[tuple[str, str, str, tuple[Any, ...]]]) -> int:
        won = 0
        for at in range(0, len(asked), _BATCH):
            chunk = asked[at : at + _BATCH]
            statements = [{"Statement": text, "Parameters": values} for _, _, text, values in chunk]
            status, answer = self._ask("BatchExecuteStatement", {"Statements": statements})
            for (key, before, _, _), result in zip(chunk, answer["Responses"], strict=True):
                won += self._judge(key, before, status, result.get("Error", {}))
        return won

    def _judge(self, key: str, before: str, status: int, answer: dict[str, Any]) -> bool:
        told = json.dumps(answer)
        if any(word in told for word in _LOST):
            return False
        if status != 200 or "Code" in answer:
            raise RuntimeError(f"unexpected answer {status}: {told}")
        self.won.append((key, before))
        return True

    def _put(self, key: str, condition: dict[str, str]) -> dict[str, Any]:
        item = {"k": _b(key), "r": _b(self.name)}
        return {"TableName": self._table, "Item": item, **condition}

    def _read(self, key: str) -> str:
        asked = {"Keys": [{"k": _b(key)}], "ConsistentRead": True}
        _, answer = self._ask("BatchGetItem", {"RequestItems": {self._table: asked}})
        items = answer["Responses"].get(self._table, [])
        return base64.b64decode(items[0]["r"]["B"]).decode() if items else ""

    def _ask(self, operation: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        scope = "AKIAINVENTEDEXAMPLE/20260101/us-east-1/dynamodb/aws4_request"
        headers = {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": f"DynamoDB_20120810.{operation}",
            "X-Amz-Date": "20260101T000000Z",
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
        }
        self._connection.request("POST", "/", json.dumps(body), headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


def _b(text: str) -> dict[str, str]:
    return {"B": base64.b64encode(text.encode()).decode()}


def _run(racer: Racer, task: str, start: threading.Event, failures: list[str]) -> None:
    start.wait()
    work: Callable[[], None] = getattr(racer, task)
    try:
        work()
    except Exception as error:  # noqa: BLE001 - told to the one who judges
        failures.append(f"{racer.name}: {type(error).__name__}: {error}")


def main(port: str, table: str, name: str, threads: str, task: str, *keys: str) -> None:
    racers = [Racer(int(port), table, f"{name}.{at}", list(keys)) for at in range(int(threads))]
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
    won = {racer.name: racer.won for racer in racers}
    print(json.dumps({"won": won, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
