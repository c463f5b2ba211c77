"""
A way to an emulator of AWS, on which single operations are answered otherwise.

What the emulator cannot be made to say (a right that is denied, a second page, a busy moment, an
event source that waits) is said here; all else goes through as it came.
"""

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, bytes]
Asked = dict[str, Any]
Forward = Callable[[], Answer]
Change = Callable[[Asked, Forward], Answer]

_PATHS = {
    r"/2015-03-31/event-source-mappings/?": "lambda:ListEventSourceMappings",
    r"/2015-03-31/functions/[^/]+/configuration": "lambda:GetFunctionConfiguration",
    r"/2019-09-25/functions/[^/]+/event-invoke-config": "lambda:GetFunctionEventInvokeConfig",
}
_PREFIXES = {
    "AWSEvents": "events",
    "AmazonSQS": "sqs",
    "DynamoDB_20120810": "dynamodb",
    "Kinesis_20131202": "kinesis",
}
_DROPPED = (
    *("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"),
    "x-amz-crc32",  # of what the emulator has said
)


class Overlay:
    """What is answered otherwise, by action (`events:ListRules`), and all that was asked."""

    def __init__(self, endpoint: str) -> None:
        self.changes: dict[str, Change] = {}
        self.asked: list[str] = []
        parts = urlsplit(endpoint)
        self._to = parts.hostname, parts.port
        overlay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                overlay._answer(self)

            do_GET = do_POST  # noqa: N815 - as the standard library calls it

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def deny(self, action: str) -> None:
        """Refuse an action, as AWS does to somebody without the right."""
        if action == "sqs:GetQueueUrl":  # which SQS does in words of its own
            text = "The specified queue does not exist or you do not have access to it."
            code = "com.amazonaws.sqs#QueueDoesNotExist"
            self.say(action, 400, {"__type": code, "message": text})
            return
        self.say(action, 403, {"__type": "AccessDeniedException", "message": "no"})

    def say(self, action: str, status: int, answer: Any) -> None:
        """Always answer this."""
        service = action.partition(":")[0]
        if service in ("iam", "sts", "sns", "s3"):
            code = answer["__type"] if status >= 300 else ""
            error = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
            body = error if service == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
        else:
            body = json.dumps(answer)
        self.changes[action] = lambda _asked, _forward: (status, body.encode())

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        action = _action(request, body)
        self.asked.append(action)
        headers: list[tuple[str, str]] = []

        def forward() -> Answer:
            connection = http.client.HTTPConnection(*self._to, timeout=30)
            try:
                given = dict(request.headers.items())
                connection.request(request.command, request.path, body, given)
                answer = connection.getresponse()
                headers.extend(answer.getheaders())
                return answer.status, answer.read()
            finally:
                connection.close()

        change = self.changes.get(action)
        asked = json.loads(body) if body[:1] == b"{" else {}
        status, told = forward() if change is None else change(asked, forward)
        request.send_response(status)
        for name, value in headers:
            if name.lower() not in _DROPPED:
                request.send_header(name, value)
        if status == 403 and not headers:
            request.send_header("x-amzn-ErrorType", "AccessDeniedException")
        request.send_header("Content-Length", str(len(told)))
        request.end_headers()
        request.wfile.write(told)


def _action(request: BaseHTTPRequestHandler, body: bytes) -> str:
    target = request.headers.get("X-Amz-Target", "")
    if target:
        prefix, _, operation = target.partition(".")
        return f"{_PREFIXES.get(prefix, prefix)}:{operation}"
    scope = re.search(r"/([a-z0-9]+)/aws4_request", request.headers.get("Authorization", ""))
    service = scope[1] if scope else ""
    if body.startswith(b"Action="):
        return f"{service}:{parse_qs(body.decode())['Action'][0]}"
    path, _, query = request.path.partition("?")
    if service == "s3":
        wanted = {"versioning": "GetBucketVersioning", "lifecycle": "GetLifecycleConfiguration"}
        return f"s3:{wanted.get(query.partition('=')[0], query)}"
    return next((name for form, name in _PATHS.items() if re.fullmatch(form, path)), path)


@contextmanager
def overlaid(endpoint: str) -> Iterator[Overlay]:
    overlay = Overlay(endpoint)
    thread = threading.Thread(target=overlay._server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield overlay
    finally:
        overlay._server.shutdown()
        overlay._server.server_close()
        thread.join()
