"""A page of another site, in a real browser on this machine, cannot send events."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.browser.towns import order, site

PAGE = """<!doctype html><title>elsewhere</title><iframe name="frame"></iframe>
<form method="post" enctype="text/plain" target="frame"><textarea name="x"></textarea></form>"""
FETCH = """([url, body]) => fetch(url, {method: "POST", mode: "no-cors", body}).then(
  (answer) => answer.type, (error) => String(error))"""
BEACON = "([url, body]) => navigator.sendBeacon(url, body)"
FORM = """([url, body]) => {
  const form = document.forms[0], field = form.elements[0];
  // {"a":1,"x=":0} in plain text: the name is the event up to its last member
  field.name = body.slice(0, -1) + ',"x';
  field.value = '":0}';
  form.action = url;
  form.submit();
}"""


@contextmanager
def elsewhere():
    """Serve a page that is not ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = PAGE.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with site(tmp_path_factory.mktemp("town")) as running:
        yield running


def test_the_text_that_the_form_sends_is_an_event(town):
    # Otherwise the test below would pass because of what is sent, and not of who sends it.
    event = order()
    body = f'{json.dumps(event)[:-1]},"x=":0}}\r\n'.encode()
    assert town.send(body) == "delivered"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "evil.localhost"])
@pytest.mark.parametrize("way", [FETCH, BEACON, FORM], ids=["fetch", "beacon", "form"])
def test_a_page_of_another_site_sends_nothing_in(visits, town, way, name):
    event = order()
    with elsewhere() as port:
        page = visits.open(
            f"http://{name}:{port}/",
            allowed=("left the origin", "403", "favicon", "ERR_BLOCKED", "Failed to load"),
        )
        with page.expect_response(lambda answer: answer.url == town.source) as answered:
            page.evaluate(way, [town.source, json.dumps(event)])
        assert answered.value.status == 403
    assert town.send(event) == "delivered"  # and not "duplicate": it is new here
    assert town.sink.has(event["detail"]["order"]) == 1
