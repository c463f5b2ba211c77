"""Pages over real HTTP: what is found, what is not, what fails, and how it is sent."""

import asyncio
import gzip
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.dashboard.conftest import Alone, Visitor, loaded
from tests.http.live import event

from oncebridge.dashboard import Dashboard, DashboardData
from oncebridge.dashboard.page import PageNotFound, PageRoute, Redirect, TemplatePage
from oncebridge.errors import ConfigError, DeadLetterError, OncebridgeError, StoreUnavailable

PAGES = ("/", "/decisions", "/dead", "/rules")
WORDS = "<script>alert(1)</script> & \"more\" of 'it'"


def shown(title="there", why="it is", status=200):
    return TemplatePage(
        "error.html", {"title": title, "why": why, "facts": (), "again": ""}, status
    )


def says(text):
    async def page(data, ask):
        return shown(why=text(ask))

    return page


def raises(error):
    async def page(data, ask):
        raise error

    return page


def views(*routes):
    return {"overview": routes}


# --- finding pages --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_every_view_is_served(serve, path):
    answer = serve().get(path)
    assert answer.status == 200
    assert answer["Content-Type"] == "text/html; charset=utf-8"
    assert '<html lang="en">' in answer.text
    assert answer["Date"].endswith("GMT")


def test_what_is_not_there_is_a_page_that_says_so(serve):
    visitor = serve()
    for path in ("/nothing", "/dead/1/2/3/4", "//", "/static/", "/DEAD", "/dead/"):
        answer = visitor.get(path)
        assert (answer.status, "Not found" in answer.text) == (404, True), path


def test_a_head_has_the_headers_of_a_get_and_no_body(serve):
    visitor = serve(views(PageRoute("GET", "/", says(lambda _: "x"))))
    head, get = visitor.ask("HEAD", "/"), visitor.get("/")
    assert (head.status, head.raw) == (200, b"")
    assert head["Content-Length"] == get["Content-Length"] == str(len(get.raw))


def test_another_method_is_told_which_there_are(serve):
    both = views(
        PageRoute("GET", "/act", says(lambda _: "")), PageRoute("POST", "/act", says(lambda _: ""))
    )
    visitor = serve(both)
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        answer = visitor.ask(method, "/act", Origin=f"http://{visitor.host}")
        assert (answer.status, answer["Allow"]) == (405, "GET, HEAD, POST")
    assert visitor.ask("POST", "/static/app.css", b"", Origin=visitor.url[:-1]).status == 405


def test_a_part_of_a_path_is_decoded_and_the_plainest_route_wins(serve):
    one = PageRoute("GET", "/x/{name}", says(lambda ask: f"name={ask.names['name']}"))
    plain = PageRoute("GET", "/x/new", says(lambda ask: f"plain {ask.names}"))
    visitor = serve(views(one, plain))
    assert "plain {}" in visitor.get("/x/new").text
    assert "name=a/b ü" in visitor.get("/x/a%2Fb%20%C3%BC").text
    assert "name=.." in visitor.get("/x/..").text
    assert visitor.get("/x/").status == 404


@pytest.mark.parametrize("path", ["/x/%", "/x/%zz", "/x/%ff", "/x/%00", "/x/a%0d%0ab", "/x?a=%ff"])
def test_what_cannot_be_read_is_refused(serve, path):
    visitor = serve(
        views(PageRoute("GET", "/x", says(str)), PageRoute("GET", "/x/{name}", says(str)))
    )
    assert visitor.get(path).status == 400


def test_a_query_is_decoded_and_bounded(serve):
    visitor = serve(views(PageRoute("GET", "/", says(lambda ask: f"{sorted(ask.query.items())}"))))
    assert (
        "[(&#39;a&#39;, &#39;2 +&#39;), (&#39;b&#39;, &#39;&#39;)]"
        in visitor.get("/?a=1&b=&a=2+%2B").text
    )
    assert visitor.get("/?" + "&".join(f"a{n}=" for n in range(101))).status == 400
    assert visitor.get("/?" + "a" * 40_000).status == 431


def test_the_script_says_that_it_asks_again(serve):
    visitor = serve(views(PageRoute("GET", "/", says(lambda ask: f"live: {ask.is_live}"))))
    assert "live: False" in visitor.get().text
    assert "live: True" in visitor.get(X_Live="1").text


# --- what a page makes ------------------------------------------------------------------------


def test_whatever_a_page_shows_is_escaped(serve):
    text = serve(views(PageRoute("GET", "/", says(lambda _: WORDS)))).get().text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;more&#34; of &#39;it&#39;" in text
    assert "<script>alert" not in text


FAILURES = [
    (PageNotFound(), 404, "Not found"),
    (StoreUnavailable("quoted"), 503, "The store is unavailable"),
    (DeadLetterError("quoted"), 503, "The dead letters are unavailable"),
    (OncebridgeError("quoted"), 500, "Internal error"),
    (RuntimeError("quoted"), 500, "Internal error"),
    (KeyError("quoted"), 500, "Internal error"),
]


@pytest.mark.parametrize(("error", "status", "title"), FAILURES)
def test_a_page_that_fails_says_so_and_nothing_of_what_the_error_said(
    serve, caplog, error, status, title
):
    caplog.set_level(logging.INFO, "oncebridge")
    answer = serve(views(PageRoute("GET", "/x/{name}", raises(error)))).get("/x/secret-name")
    assert (answer.status, f"<h1>{title}</h1>" in answer.text) == (status, True)
    assert "quoted" not in answer.text + caplog.text
    assert "secret-name" not in caplog.text
    if status != 404:
        (record,) = [r for r in caplog.records if r.message == "oncebridge.dashboard_page_failed"]
        assert (record.page, record.error) == ("GET /x/{name}", type(error).__name__)
    if status == 500:
        assert re.search(r"number ([0-9a-f]{8}) in the log", answer.text)[1] == record.number


def test_a_template_that_lacks_a_value_is_a_page_that_failed(serve, caplog):
    async def page(data, ask):
        return TemplatePage("error.html", {})

    assert serve(views(PageRoute("GET", "/", page))).get().status == 500
    assert "UndefinedError" in {getattr(r, "error", "") for r in caplog.records}


def test_while_the_store_is_away_it_is_told_what_is_known_without_it(service):
    live, _ = service()
    away = views(PageRoute("GET", "/", raises(StoreUnavailable("quoted"))))

    async def beside():
        data = DashboardData(live.setup, live.store, live.service.router, live.service.monitor)
        dashboard = Dashboard(live.setup, data, views=away)
        await dashboard.open()
        return dashboard

    dashboard = live.do(beside)
    live.store.broken = StoreUnavailable("quoted")
    (gateway,) = live.service.router.gateways
    live.until(lambda: live.post(event(1)).status == 503 and live.do(gateway.down), within=20)
    answer = Visitor(dashboard.url).get("/")
    live.store.broken = None
    live.do(dashboard.aclose)
    assert (answer.status, "The store is unavailable" in answer.text) == (503, True)
    assert "desk: the store was down when it was last tried" in answer.text
    assert "quoted" not in answer.text


# --- after something was done ----------------------------------------------------------------


def acting(note="", to="/"):
    async def act(data, ask):
        return Redirect(to, note)

    form = PageRoute("GET", "/form", says(lambda ask: f'name="token" value="{ask.token}"'))
    return views(PageRoute("GET", "/", says(lambda _: "")), form, PageRoute("POST", "/act", act))


def act(visitor):
    token = re.search(r"value=&#34;([^&]+)&#34;", visitor.get("/form").text)[1]
    return visitor.post("/act", {"token": token})


def test_a_note_about_what_was_done_is_seen_once_on_the_next_page(serve):
    visitor = serve(acting("3 parcels were dropped: <b>ü</b>\r\nSet-Cookie: x=1"))
    answer = act(visitor)
    assert (answer.status, answer["Location"], answer.raw) == (303, "/", b"")
    (cookie,) = answer.all("Set-Cookie")
    assert "; Path=/; Max-Age=60; HttpOnly; SameSite=Strict" in cookie
    assert "Secure" not in cookie
    # the script that keeps another page fresh does not take the note away
    assert (
        "parcels" not in visitor.get("/", Sec_Fetch_Mode="cors", Sec_Fetch_Site="same-origin").text
    )
    assert "3 parcels were dropped: &lt;b&gt;ü&lt;/b&gt;" in visitor.get("/").text
    assert "parcels" not in visitor.get("/").text


def test_a_note_that_was_not_written_here_is_not_shown(serve):
    visitor = serve(acting("3 parcels"))
    act(visitor)
    ((name, value),) = visitor.cookies.items()
    until, text, signature = value.split(".")
    forged = [
        f"{until}.{text[:-2]}AA.{signature}",
        f"{int(until) + 9}.{text}.{signature}",
        f"{text}.{signature}",
        "x",
        "",
        "..",
        "\xff.\xff.\xff",
        f"{value}; {name}={value}",
    ]
    for cookie in forged:
        answer = visitor.get("/", Cookie=f"{name}={cookie}")
        assert (answer.status, "parcels" in answer.text) == (200, False), cookie
    assert "3 parcels" in visitor.get("/", Cookie=f"{name}={value}").text


def test_a_note_is_forgotten_after_a_minute(serve):
    now = [1_800_000_000_000]
    visitor = serve(acting("3 parcels"), clock=lambda: now[0])
    act(visitor)
    now[0] += 61_000
    assert "parcels" not in visitor.get("/").text


def test_a_long_note_is_cut_so_that_browsers_keep_it(serve):
    visitor = serve(acting("ü" * 5000))
    (cookie,) = act(visitor).all("Set-Cookie")
    assert len(cookie) < 4000
    assert "ü" * 900 in visitor.get("/").text


@pytest.mark.parametrize(
    "to", ["//evil.example", "https://evil.example", "/\\evil", "/a\r\nX: y", "x"]
)
def test_nobody_is_sent_away_from_here(serve, to):
    answer = act(serve(acting(to=to)))
    assert answer.status == 500
    assert not answer.all("Location")
    assert not answer.all("X")


def test_an_address_with_strange_characters_is_encoded(serve):
    assert act(serve(acting(to="/x/ü%2F?a=b c&d=%20")))["Location"] == "/x/%C3%BC%2F?a=b%20c&d=%20"


# --- how it is sent --------------------------------------------------------------------------


def test_a_file_is_sent_once_and_then_only_asked_after(serve):
    visitor = serve()
    answer = visitor.get("/static/app.css")
    assert (answer.status, answer["Content-Type"]) == (200, "text/css; charset=utf-8")
    assert answer["Cache-Control"] == "no-cache"
    assert answer["X-Content-Type-Options"] == "nosniff"
    for known in (answer["ETag"], f'"x", W/{answer["ETag"]}'):
        again = visitor.get("/static/app.css", If_None_Match=known)
        assert (again.status, again.raw, again["ETag"]) == (304, b"", answer["ETag"])
    assert visitor.get("/static/app.css", If_None_Match='"other"').status == 200


def test_files_have_the_types_that_browsers_insist_on(serve):
    visitor = serve()
    assert visitor.get("/static/app.js")["Content-Type"] == "text/javascript; charset=utf-8"
    assert visitor.get("/static/favicon.svg")["Content-Type"] == "image/svg+xml"


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5, br", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("br", False),
        ("", False),
        (None, False),
    ],
)
def test_gzip_is_sent_to_whom_it_is_of_use(serve, accepted, packed):
    visitor = serve(views(PageRoute("GET", "/", says(lambda _: "x" * 5000))))
    for path in ("/", "/static/app.css"):
        plain, answer = visitor.get(path), visitor.get(path, Accept_Encoding=accepted)
        assert answer.all("Content-Encoding") == (["gzip"] if packed else [])
        assert (gzip.decompress(answer.raw) if packed else answer.raw) == plain.raw
        assert "Accept-Encoding" in answer["Vary"]


def test_a_first_visit_costs_less_than_200_kb(service):
    live, visitor = service(history="all")
    for number in range(40):
        live.post(event(number % 25))
    for path in PAGES:
        page = visitor.get(path, Accept_Encoding="gzip")
        text = gzip.decompress(page.raw).decode()
        files = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', text))
        assert {"/static/app.css", "/static/app.js"} <= files
        answers = [page, *(visitor.get(file, Accept_Encoding="gzip") for file in files)]
        over_the_wire = sum(
            len(answer.raw) + sum(len(n) + len(v) + 4 for n, v in answer.headers)
            for answer in answers
        )
        assert over_the_wire < 200_000, (path, over_the_wire)


def test_ten_browsers_cost_one_reading(serve):
    count = []

    async def page(data, ask):
        reading = data._read

        async def counted():
            count.append(1)
            return await reading()

        data._read = counted
        await data.view()
        data._read = reading
        return shown()

    visitor = serve(views(PageRoute("GET", "/", page)))
    with ThreadPoolExecutor(10) as crowd:
        assert {a.status for a in crowd.map(lambda _: visitor.get(), range(10))} == {200}
    assert 1 <= len(count) <= 3  # a slow machine takes more than a second for ten


def test_whether_the_process_lives_is_told_however_busy_it_is(serve):
    begun, go_on = [], threading.Event()

    async def slow(data, ask):
        begun.append(1)
        while not go_on.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        return shown()

    visitor = serve(views(PageRoute("GET", "/", slow)))
    with ThreadPoolExecutor(20) as crowd:
        answers = [crowd.submit(visitor.get) for _ in range(20)]
        try:
            while len(begun) < 16:
                time.sleep(0.01)
            assert visitor.get("/healthz").status == 200
            assert len(begun) == 16  # the others wait
        finally:
            go_on.set()
        assert [answer.result().status for answer in answers] == [200] * 20


def test_a_page_that_takes_too_long_is_given_up(serve, monkeypatch):
    monkeypatch.setattr("oncebridge.dashboard.app._PATIENCE_S", 0.05)

    async def slow(data, ask):
        await asyncio.sleep(60)

    answer = serve(views(PageRoute("GET", "/", slow))).get()
    assert (answer.status, "Timeout" in answer.text) == (503, True)


# --- beside ----------------------------------------------------------------------------------


def test_metrics_are_there_where_the_service_is_and_elsewhere_a_hint(service, serve):
    _, visitor = service()
    answer = visitor.get("/metrics")
    assert answer.status == 200
    assert "oncebridge" in answer.text
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert visitor.ask("POST", "/metrics", b"", Origin=visitor.url[:-1]).status == 405
    alone = serve().get("/metrics")
    assert (alone.status, "scrape each worker" in alone.text) == (404, True)


def test_a_port_that_is_taken_is_told_clearly(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        setup = loaded(tmp_path, dashboard=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"dashboard: 127.*another program uses this port"):  # noqa: SIM117
            with Alone(setup, {}).up():
                pass


def test_it_listens_on_ipv6_too(serve):
    visitor = serve(dashboard="http://[::1]:0/")
    assert visitor.url.startswith("http://[::1]:")
    assert visitor.get().status == 200
