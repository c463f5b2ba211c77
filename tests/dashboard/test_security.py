"""What a page of somebody else, or somebody on the line, might try."""

import json
import logging
import platform
import re
import socket
import time
from contextlib import ExitStack, closing
from urllib.parse import urlencode, urlsplit

import pytest
from msgspec.structs import replace
from tests.dashboard.conftest import TOKEN, Visitor
from tests.dashboard.test_server import shown, views
from tests.http.live import event

from oncebridge.dashboard.page import PageRoute, Redirect, TemplatePage
from oncebridge.dashboard.server import _LargeBodies
from oncebridge.http.server import Request

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class Book:
    """Views of which one changes something; what was done stands in *done*."""

    def __init__(self):
        self.done = []

        async def form(data, ask):
            return TemplatePage("login.html", {"next": "/", "wrong": ""})

        async def act(data, ask):
            self.done.append((ask.user, dict(ask.form)))
            return Redirect("/", "done")

        async def look(data, ask):
            return shown(why=f"{sum(map(len, ask.form.get('event', ())))} characters")

        self.views = views(
            PageRoute("GET", "/", form),
            PageRoute("POST", "/act", act, writes=True),
            PageRoute("POST", "/try", look),
        )


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def visitor(serve, book):
    """Somebody on this machine, where things may be done."""
    return serve(book.views, dashboard_write="true")


# --- headers --------------------------------------------------------------------------------


def test_every_answer_keeps_the_browser_careful(serve, book):
    visitor = serve(book.views, dashboard_token=TOKEN)
    stranger, inside = Visitor(visitor.url), Visitor(visitor.url)
    inside.log_in()
    answers = [
        inside.get("/"),
        inside.get("/nothing"),
        inside.get("/%zz"),
        inside.get("/static/app.css"),
        inside.get("/static/nothing"),
        inside.get("/metrics"),
        inside.get("/healthz"),
        inside.ask("PUT", "/", Origin=visitor.url[:-1]),
        inside.post("/act", {}),
        stranger.get("/"),
        stranger.get("/", Accept="*/*"),
        stranger.get("/login"),
        stranger.log_in("wrong"),
        stranger.log_in(),
        stranger.get("/", Host="evil.example"),
        stranger.get("/static/app.css", If_None_Match=inside.get("/static/app.css")["ETag"]),
    ]
    assert {a.status for a in answers} >= {200, 303, 304, 400, 401, 403, 404, 405}
    for answer in answers:
        assert answer["Content-Security-Policy"] == POLICY
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Referrer-Policy"] == "same-origin"
        assert answer["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer["Cache-Control"] in ("no-store", "no-cache")
        is_file = "ETag" in dict(answer.headers)
        assert answer["Cache-Control"] == ("no-cache" if is_file else "no-store")
        assert not answer.all("Access-Control-Allow-Origin")


INLINE = re.compile(r"<script(?![^>]* src=)|<style|\son[a-z]+=|\sstyle=|javascript:", re.IGNORECASE)


def test_no_page_has_script_or_style_of_its_own(service):
    live, visitor = service(history="all", dashboard_write="true", dashboard_payloads="true")
    live.post(event(1))
    live.post(event(1))
    live.post(b"no event")
    for path in ("/", "/decisions", "/dead", "/rules", "/nothing"):
        page = visitor.get(path)
        assert page.status in (200, 404)
        assert not INLINE.search(page.text), INLINE.search(page.text)


# --- under another name --------------------------------------------------------------------

HERE = ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]", "127.9.9.9", "x.localhost"]
AWAY = [
    *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost"),
    *("192.0.2.7", "10.0.0.1", "0.0.0.0", "[::]", "[2001:db8::1]", "127.1", "2130706433", ""),
]


@pytest.mark.parametrize("name", HERE)
def test_this_machine_has_many_names(visitor, name):
    port = urlsplit(visitor.url).port
    assert visitor.get("/", Host=f"{name}:{port}").status == 200
    assert visitor.get("/", Host=name).status == 200


@pytest.mark.parametrize("name", AWAY)
def test_a_name_that_somebody_else_has_made_up_is_refused(visitor, book, name):
    port = urlsplit(visitor.url).port
    for host in (name, f"{name}:{port}" if name else ":"):
        for path in ("/", "/dead", "/static/app.css", "/metrics", "/nothing"):
            answer = visitor.get(path, Host=host)
            assert (answer.status, "dashboard_hosts" in answer.text) == (403, True), (host, path)
    token = visitor.get("/").token
    answer = visitor.post("/act", {"token": token}, Host=name, Origin=f"http://{name}")
    assert (answer.status, book.done) == (403, [])


def test_a_request_without_a_name_is_refused(visitor):
    parts = urlsplit(visitor.url)
    with closing(socket.create_connection((parts.hostname, parts.port), 20)) as line:
        line.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 403 ")


def test_further_names_can_be_given(serve, book):
    names = "Ops.example.com, db.example.com:9000, [2001:db8::7]"
    visitor = serve(book.views, dashboard_write="true", dashboard_hosts=names)
    for host in (
        "ops.example.com",
        "ops.example.com:1234",
        "db.example.com:9000",
        "[2001:db8::7]:80",
    ):
        assert visitor.get("/", Host=host).status == 200
        token = visitor.get("/", Host=host).token
        form = {"token": token}
        assert visitor.post("/act", form, Host=host, Origin=f"https://{host}").status == 303
    for host in ("db.example.com", "db.example.com:9001", "x.ops.example.com"):
        assert visitor.get("/", Host=host).status == 403


def test_where_people_log_in_an_address_in_numbers_is_good_and_a_strange_name_is_not(serve, book):
    visitor = serve(book.views, dashboard_token=TOKEN)
    for host in ("192.0.2.7:8081", "[2001:db8::1]", "localhost"):
        assert visitor.get("/", Host=host).status == 303
    assert visitor.get("/", Host="evil.example").status == 403
    assert visitor.get("/login", Host="evil.example").status == 403


def test_a_page_with_a_made_up_name_cannot_pass_for_the_proxy(serve, book):
    # It reaches us from this machine, where the proxy is.
    visitor = serve(
        book.views,
        dashboard_write="true",
        dashboard_user_header="X-Forwarded-User",
        dashboard_proxies="127.0.0.1",
        dashboard_hosts="ops.example.com",
    )
    visitor.headers = {"X-Forwarded-User": "ada"}
    evil = {"Host": "evil.example", "Sec_Fetch_Site": "same-origin"}
    answer = visitor.get("/", **evil)
    assert (answer.status, 'name="token"' in answer.text) == (403, False)
    assert "proxy sends as Host, add it to dashboard_hosts" in answer.text
    token = visitor.get("/").token
    answer = visitor.post("/act", {"token": token}, Origin="http://evil.example", **evil)
    assert (answer.status, book.done) == (403, [])
    for host in ("ops.example.com", "192.0.2.7:8081", platform.node(), "localhost:1"):
        assert visitor.get("/", Host=host).status == 200


def test_the_name_that_was_asked_for_is_told_and_escaped(visitor):
    assert (
        "evil&#39;x.example is not a known host name"
        in visitor.get("/", Host="evil'x.example").text
    )


# --- forged requests -----------------------------------------------------------------------


def test_a_form_of_ours_is_done(visitor, book):
    answer = visitor.post("/act", {"token": visitor.get("/").token, "number": [3, 4]})
    assert answer.status == 303
    assert book.done == [("", {"number": ["3", "4"]})]


def test_a_token_is_another_in_every_page_and_each_is_good(visitor, book):
    tokens = {visitor.get("/").token for _ in range(3)}
    assert len(tokens) == 3
    for token in tokens:
        assert visitor.post("/act", {"token": token}).status == 303
    assert len(book.done) == 3


@pytest.mark.parametrize("token", [None, "", "x", ".", "a.b", ["good", "good"], "cut", "joined"])
def test_without_its_token_a_form_is_not_done(visitor, book, token):
    good = visitor.get("/").token
    given = {"cut": good[:-1], "joined": good.replace(".", "")}.get(str(token), token)
    given = [good, good] if isinstance(token, list) else given
    answer = visitor.post("/act", {} if given is None else {"token": given})
    assert (answer.status, book.done) == (403, [])
    assert "Nothing was done" in answer.text


def test_a_token_in_the_query_does_not_count(visitor, book):
    assert visitor.post(f"/act?token={visitor.get('/').token}", {"x": 1}).status == 403
    assert book.done == []


def test_a_token_of_somebody_else_does_not_count(serve, book):
    visitor = serve(
        book.views,
        dashboard_write="true",
        dashboard_token=TOKEN,
        dashboard_user_header="X-Forwarded-User",
        dashboard_proxies="127.0.0.1",
    )
    ada, eve = (Visitor(visitor.url, headers={"X-Forwarded-User": n}) for n in ("ada", "eve"))
    one, two = Visitor(visitor.url), Visitor(visitor.url)
    one.log_in()
    two.log_in()
    people = [ada, eve, one, two]
    anybody = visitor.get("/login").token
    tokens = [person.get("/").token for person in people]
    for person in people:
        for token in [anybody, *tokens]:
            is_own = token == tokens[people.index(person)]
            assert person.post("/act", {"token": token}).status == (303 if is_own else 403)
    assert [user for user, _ in book.done] == ["ada", "eve", *["unknown (token)"] * 2]


def test_a_token_from_before_a_restart_does_not_count_where_nobody_logs_in(serve, book):
    before = serve(book.views, dashboard_write="true").get("/").token
    again = serve(book.views, dashboard_write="true")
    assert again.post("/act", {"token": before}).status == 403


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": None},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1.evil.example"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "file://"},
    {"Origin": "http://[bad"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
    {"Sec_Fetch_Site": ""},
    {"Sec_Fetch_Site": "Same-Origin, cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=json.dumps)
def test_a_form_on_a_page_of_somebody_else_is_not_done(visitor, book, headers):
    token = visitor.get("/").token
    answer = visitor.post("/act", {"token": token}, **headers)
    assert (answer.status, book.done) == (403, [])


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_what_the_browser_itself_vouches_for_is_done_whatever_a_proxy_has_renamed(
    visitor, book, site
):
    token = visitor.get("/").token
    said = {"Sec_Fetch_Site": site, "Origin": "https://public.example.com"}
    assert visitor.post("/act", {"token": token}, **said).status == 303
    assert len(book.done) == 1


def test_a_program_with_the_token_needs_no_origin_and_still_the_forms_token(serve, book):
    visitor = serve(book.views, dashboard_write="true", dashboard_token=TOKEN)
    visitor.headers = {"Authorization": f"Bearer {TOKEN}"}
    token = visitor.get("/").token
    assert visitor.post("/act", {}, Origin=None).status == 403
    assert visitor.post("/act", {"token": token}, Origin=None).status == 303
    assert visitor.post("/act", {"token": token}, Sec_Fetch_Site="cross-site").status == 403


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "QUERY"])
def test_only_a_post_does_anything(visitor, book, method):
    token = visitor.get("/").token
    answer = visitor.ask(method, f"/act?token={token}&number=1", Origin=visitor.url[:-1])
    assert (answer.status, answer["Allow"]) == (405, "POST")
    assert book.done == []


def test_another_method_in_a_header_or_field_is_not_one(visitor, book):
    answer = visitor.get("/act", X_HTTP_Method_Override="POST")
    assert (answer.status, book.done) == (405, [])


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_no_page_can_be_part_of_one_of_somebody_else(visitor, site):
    for mode in ("no-cors", "cors", "websocket", None):
        assert visitor.get("/", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode).status == 403
    assert visitor.get("/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 200


def test_where_nothing_may_be_changed_it_is_said_how_to_allow_it(serve, book):
    visitor = serve(book.views)
    answer = visitor.post("/act", {"token": visitor.get("/").token})
    assert (answer.status, book.done) == (403, [])
    assert "dashboard_write = true" in answer.text
    # what changes nothing is done all the same
    tried = visitor.post("/try", {"token": visitor.get("/").token, "event": "{}"})
    assert (tried.status, "2 characters" in tried.text) == (200, True)


# --- strange bodies ------------------------------------------------------------------------


def test_a_form_is_urlencoded_and_nothing_else(visitor, book):
    token = visitor.get("/").token
    body = f"token={token}".encode()
    own = {"Origin": visitor.url[:-1]}
    for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x", None):
        answer = visitor.ask("POST", "/act", body, Content_Type=kind, **own)
        assert answer.status == 415
    kind = "Application/X-WWW-Form-Urlencoded; charset=utf-8"
    assert visitor.ask("POST", "/act", body, Content_Type=kind, **own).status == 303
    assert len(book.done) == 1


@pytest.mark.parametrize("body", [b"a=%ff", b"a=%", b"a=\xff", b"&".join([b"a=1"] * 5001)])
def test_a_form_that_cannot_be_read_is_refused(visitor, book, body):
    answer = visitor.ask(
        "POST",
        "/act",
        body,
        Content_Type="application/x-www-form-urlencoded",
        Origin=visitor.url[:-1],
    )
    assert (answer.status, book.done) == (400, [])


def test_an_event_of_the_largest_size_can_be_tried_and_no_more(visitor):
    token = visitor.get("/").token
    answer = visitor.post("/try", {"token": token, "event": "x" * 2_500_000})
    assert "2500000 characters" in answer.text
    assert visitor.post("/try", {"token": token, "event": "x" * 7_400_000}).status == 413


def test_a_stranger_sends_no_body_that_anybody_reads(serve, book):
    visitor = serve(book.views, dashboard_token=TOKEN)
    parts = urlsplit(visitor.url)
    login = b"POST /login HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
    for head, status in (
        (b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n", b"403"),
        (login.replace(b"/login", b"/act") + b"Content-Length: 2000000\r\n", b"401"),
        (login + b"Content-Length: 5000\r\n", b"413"),
        (login + b"Transfer-Encoding: chunked\r\n", b"413"),
        (login.replace(b"/login", b"/static/app.css") + b"Content-Length: 2000000\r\n", b"401"),
        (login.replace(b"/login", b"/static/x") + b"Transfer-Encoding: chunked\r\n", b"401"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n", b"413"),
    ):
        with closing(socket.create_connection((parts.hostname, parts.port), 20)) as line:
            began = time.monotonic()
            line.sendall(head + b"\r\n")  # and nothing of the body
            assert line.recv(100).startswith(b"HTTP/1.1 " + status), head
            assert time.monotonic() - began < 15


def test_of_large_bodies_only_so_many_are_kept_at_once(visitor):
    parts = urlsplit(visitor.url)
    head = (
        b"POST /try HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n\r\n"
    )
    form = urlencode({"token": visitor.get("/").token, "event": "x" * 100_000}).encode()

    def begin(stack, length):
        """Send a head, and wait until it was taken in or refused; no byte of the body."""
        line = stack.enter_context(closing(socket.create_connection((parts.hostname, port), 20)))
        line.sendall((head % length).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        return line, line.recv(4096)

    port = parts.port
    with ExitStack() as stack:
        for length in (8 * 1024 * 1024, 8 * 1024 * 1024):  # never read, so it takes no room
            assert begin(stack, length)[1].startswith(b"HTTP/1.1 413 ")
        lines = [begin(stack, len(form)) for _ in range(8)]
        assert {said[:12] for _, said in lines} == {b"HTTP/1.1 100"}
        said = begin(stack, len(form))[1]
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 5" in said
        # what is small has room, and so has the next one as soon as one is answered
        small = {"token": visitor.get("/").token, "event": "{}"}
        assert "2 characters" in visitor.post("/try", small).text
        lines[0][0].sendall(form)
        answered = b""
        while b"</html>" not in answered:
            answered += lines[0][0].recv(65536)
        assert b"100000 characters" in answered
        assert begin(stack, len(form))[1].startswith(b"HTTP/1.1 100 ")
        assert begin(stack, len(form))[1].startswith(b"HTTP/1.1 503 ")


def test_a_body_that_never_comes_is_not_waited_for_forever():
    room = _LargeBodies(2, within_s=35)
    head = Request("POST", "/try", "", ((b"content-length", b"100000"),))
    assert [room.enter(head, 100.0) for _ in range(3)] == [True, True, False]
    assert room.enter(head, 136.0)
    assert room.arrive(replace(head, body=b"x" * 100_000))
    assert not room.arrive(head)  # the other was given up
    assert [room.enter(head, 137.0) for _ in range(2)] == [True, False]
    room.leave()
    assert room.enter(head, 138.0)


# --- files ---------------------------------------------------------------------------------

OUTSIDE = [
    "/static/../server.py",
    "/static/..%2fserver.py",
    "/static/%2e%2e/server.py",
    "/static/%2e%2e%2fserver.py",
    "/static/..\\server.py",
    "/static/..%5cserver.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/app.css%00.js",
    "/static/app.css/",
    "/static/./app.css",
    "/static/%61pp.css",
    "/static/APP.CSS",
    "/static/../static/app.css",
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/templates/base.html",
    "/static/__init__.py",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_only_the_files_that_are_meant_are_served(visitor, path):
    answer = visitor.get(path)
    assert answer.status in (400, 404)
    assert "import" not in answer.text.replace("important", "")
    assert "root:" not in answer.text


# --- secrets -------------------------------------------------------------------------------


def test_a_secret_is_in_no_page_and_in_no_log(service, caplog):
    caplog.set_level(logging.DEBUG, "oncebridge")
    canary = "c4n4ry-of-the-dashboard-0123456789"
    live, visitor = service(
        dashboard_token=canary,
        history="all",
        dashboard_write="true",
        log_level="debug",
        source__api_keys=f"{canary}-source",
    )
    visitor.log_in(canary)
    live.ask("POST", body=event(1), headers={"X-Api-Key": f"{canary}-source"})
    seen = [
        visitor.get(path)
        for path in ("/", "/decisions", "/dead", "/rules", "/metrics", "/nothing", "/login")
    ]
    stranger = Visitor(visitor.url)
    seen += [stranger.get("/login"), stranger.log_in(f"{canary}x"), stranger.get("/?q=" + canary)]
    texts = [a.text for a in seen[:-1]] + [str(a.headers) for a in seen[:-1]]
    texts += [str(vars(record)) for record in caplog.records]
    assert not [text for text in texts if canary in text]
