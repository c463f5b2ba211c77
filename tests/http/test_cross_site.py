"""A web page of another site cannot make a browser on this machine send events."""

import json

import pytest
from tests.http.live import PATH, event, live, read_answer
from tests.http.test_auth import basic

from oncebridge.errors import ConfigError
from oncebridge.service import config

KEY, PAIR = "apple-key-of-a-mill", "mill:grain-in-the-sacks"
OTHER_SITES = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Origin": "chrome-extension://abcdefgh"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "same-origin, cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Origin": "null"},
]
OTHER_HOSTS = [
    *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"),
    *("192.0.2.7:{port}", "0.0.0.0:{port}", "[::]", "2130706433", "127.1", "evil-localhost", ":"),
]
OWN_HOSTS = [
    *("127.0.0.1:{port}", "localhost", "LOCALHOST:{port}", "localhost.", "[::1]:{port}"),
    *("127.9.9.9", "oncebridge.localhost:{port}"),
]


def asked(running, headers):
    named = {"Host": f"127.0.0.1:{running.port}", "Content-Type": "text/plain", **headers}
    with running.line() as line:
        body = event(1)
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        line.sendall(
            f"POST {PATH} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        return read_answer(line)


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with live(tmp_path_factory.mktemp("door")) as running:
        yield running


@pytest.mark.parametrize("headers", OTHER_SITES, ids=json.dumps)
def test_a_request_of_another_sites_page_is_refused_and_nothing_is_taken(door, headers):
    before = door.counts
    answer = asked(door, headers)
    assert answer.status == 403
    assert "web page of another site" in answer.json["error"]
    assert "set api_keys" in answer.json["error"]
    assert (door.counts, door.buried()) == (before, [])


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_a_request_under_a_name_of_somebody_else_is_refused_and_nothing_is_taken(door, host):
    before = door.counts
    host = host.format(port=door.port)
    for more in ({}, {"Origin": f"http://{host}"}, {"Sec-Fetch-Site": "same-origin"}):
        answer = asked(door, {"Host": host, **more})
        assert (
            answer.status == 401
        )  # which EventBridge retries; after a 403 the event would be lost
    assert "Host: localhost" in asked(door, {"Host": host}).json["error"]
    assert "set api_keys" in asked(door, {"Host": host}).json["error"]
    assert (door.counts, door.buried()) == (before, [])


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_this_machine_may_be_called_by_all_its_names(door, host):
    assert asked(door, {"Host": host.format(port=door.port)}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"User-Agent": "curl/8.5.0", "Accept": "*/*"},
        {"User-Agent": "Amazon/EventBridge/ApiDestinations", "Range": "bytes=0-1048575"},
        {"User-Agent": "node", "Sec-Fetch-Mode": "cors", "Accept-Language": "*"},
        {"User-Agent": "python-requests/2.32", "Referer": "https://docs.example.com/"},
    ],
    ids=lambda headers: headers["User-Agent"],
)
def test_programs_are_let_in(door, headers):
    assert asked(door, headers).status == 200


def test_what_changes_nothing_is_told_under_any_name(door):
    for path in ("/healthz", "/readyz", "/openapi.json"):
        with door.line() as line:
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: 10.1.2.3:8080\r\n\r\n".encode())
            assert line.recv(12) == b"HTTP/1.1 200"


def test_the_operator_is_told_once_a_minute(tmp_path, caplog):
    with live(tmp_path) as running:
        for _ in range(5):
            assert asked(running, {"Host": "ingest.example.com"}).status == 401
    (told,) = [one for one in caplog.records if one.msg == "oncebridge.http_request_refused"]
    assert told.reason == "sent for another Host"
    assert "api_keys" in told.fix


def test_further_names_can_be_given_for_a_proxy_in_front(tmp_path):
    names = "Ingest.example.com, mesh.example.com:9000"
    with live(tmp_path, source__hosts=names) as running:
        for host in ("ingest.example.com", "INGEST.example.com:443", "mesh.example.com:9000"):
            assert asked(running, {"Host": host}).status == 200
        for host in ("mesh.example.com", "x.ingest.example.com"):
            assert asked(running, {"Host": host}).status == 401
        page = {"Host": "ingest.example.com", "Origin": "https://evil.example"}
        assert asked(running, page).status == 403


@pytest.mark.parametrize("name", ["*", "*.example.com", "https://x.example.com", "a b"])
def test_a_further_name_is_one_as_clients_send_it(name):
    flags = {"source": "http://127.0.0.1:1/", "source.hosts": f"a.example.com, {name}"}
    with pytest.raises(ConfigError, match="must be a host name"):
        config.load(None, environment={}, flags=flags)


def test_where_a_secret_is_shown_any_name_and_any_page_will_do(tmp_path):
    with live(tmp_path, source__api_keys=KEY) as running:
        for headers in ({"Host": "ingest.example.com"}, *OTHER_SITES):
            assert asked(running, {"x-api-key": KEY, **headers}).status == 200
            assert asked(running, headers).status == 401


def test_a_password_that_the_browser_adds_by_itself_is_no_word_of_the_page(tmp_path):
    with live(tmp_path, source__basic=PAIR, source__api_keys=KEY) as running:
        before = running.counts
        for headers in OTHER_SITES:
            assert asked(running, dict([basic(PAIR)]) | headers).status == 403
        assert running.counts == before
        assert asked(running, dict([basic(PAIR)]) | {"Host": "ingest.example.com"}).status == 200
