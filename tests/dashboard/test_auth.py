"""Who is let in: by a token, by a proxy's word, or by being here; and how they leave."""

import base64
import logging

import pytest
from tests.dashboard.conftest import TOKEN, Alone, Visitor, loaded
from tests.dashboard.test_dead import bury, confirmed, lines_of
from tests.dashboard.test_server import says, views
from tests.http.live import event

from oncebridge.dashboard.page import PageRoute
from oncebridge.dashboard.server import Dashboard
from oncebridge.errors import StoreUnavailable
from oncebridge.stores.sqlite.store import SQLiteStore

PROXIED = {"dashboard_user_header": "X-Forwarded-User", "dashboard_proxies": "127.0.0.1"}
WRONG = "not-the-token-but-just-as-long-0"
WHO = PageRoute("GET", "/", says(lambda ask: f"user={ask.user} leaves={ask.can_log_out}"))
NOW_MS = 1_800_000_000_000


@pytest.fixture
def guarded(serve):
    return serve(
        views(WHO, PageRoute("GET", "/dead", says(lambda _: "letters"))), dashboard_token=TOKEN
    )


# --- by a token ----------------------------------------------------------------------------


def test_a_stranger_is_sent_to_the_log_in_and_from_there_to_where_they_wanted(guarded):
    sent = guarded.get("/dead?page=2&x=%20")
    assert (sent.status, sent["Location"]) == (303, "/login?next=%2Fdead%3Fpage%3D2%26x%3D%2520")
    page = guarded.get(sent["Location"])
    assert page.status == 200
    assert 'name="next" value="/dead?page=2&amp;x=%20"' in page.text
    assert 'type="password"' in page.text
    done = guarded.log_in(next="/dead?page=2&x=%20")
    assert (done.status, done["Location"]) == (303, "/dead?page=2&x=%20")
    assert "letters" in guarded.get("/dead").text


def test_the_cookie_of_a_session_is_kept_from_scripts_and_from_other_sites(guarded):
    guarded.log_in()
    (cookie,) = Visitor(guarded.url).log_in().all("Set-Cookie")
    assert cookie.endswith("; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict")
    assert TOKEN not in cookie
    assert base64.b64encode(TOKEN.encode()).decode().rstrip("=") not in cookie


def test_a_proxy_that_speaks_tls_has_the_cookie_kept_from_plain_http(serve):
    visitor = serve(dashboard_token=TOKEN, dashboard_proxies="127.0.0.1")
    form = {"token": visitor.get("/login").token, "secret": TOKEN}
    answer = visitor.post("/login", form, X_Forwarded_Proto="https")
    assert answer["Set-Cookie"].endswith("; SameSite=Strict; Secure")


def test_only_a_proxy_that_is_named_is_believed_to_speak_tls(serve):
    visitor = serve(dashboard_token=TOKEN, dashboard_proxies="10.0.0.0/8")
    form = {"token": visitor.get("/login").token, "secret": TOKEN}
    assert "Secure" not in visitor.post("/login", form, X_Forwarded_Proto="https")["Set-Cookie"]


@pytest.mark.parametrize("to", ["//evil.example", "https://evil.example/", "/\\evil", "evil", ""])
def test_a_log_in_leads_nowhere_else(guarded, to):
    assert guarded.log_in(next=to)["Location"] == "/"
    page = Visitor(guarded.url).get(f"/login?next={to}")
    assert 'name="next" value="/"' in page.text


@pytest.mark.parametrize("wrong", [WRONG, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\udcff\0ü"])
def test_a_wrong_token_is_refused_and_never_quoted(guarded, caplog, wrong):
    caplog.set_level(logging.INFO, "oncebridge")
    wrong = wrong.encode("utf-8", "replace").decode()
    answer = guarded.log_in(wrong)
    assert (answer.status, answer.all("Set-Cookie")) == (401, [])
    assert "Wrong token." in answer.text
    assert not wrong or f'"{wrong}"' not in answer.text
    assert "oncebridge.dashboard_login_refused" in caplog.text
    assert not wrong or wrong not in caplog.text
    assert guarded.get("/").status == 303


def test_whoever_guesses_is_told_to_wait_and_nobody_else_is_refused(serve):
    now = [NOW_MS]
    visitor = serve(views(WHO), clock=lambda: now[0], dashboard_token=TOKEN)
    inside = Visitor(visitor.url)
    inside.log_in()
    tries = [visitor.log_in(WRONG).status for _ in range(12)]
    assert tries == [401] * 10 + [429] * 2
    refused = visitor.get("/", Authorization=f"Bearer {WRONG}")
    assert (refused.status, refused["Retry-After"]) == (429, "60")
    # who has the token, or had it, pays for nobody's mistakes
    assert visitor.get("/", Authorization=f"Bearer {TOKEN}").status == 200
    assert Visitor(visitor.url).log_in().status == 303
    assert inside.get("/").status == 200
    now[0] += 60_000
    assert visitor.log_in(WRONG).status == 401


def test_a_token_that_a_proxy_sends_along_for_somebody_else_keeps_nobody_out(guarded):
    guarded.headers = {"Authorization": f"Bearer {WRONG}"}
    assert {guarded.get("/dead").status for _ in range(12)} == {303, 429}
    assert guarded.log_in().status == 303
    assert "letters" in guarded.get("/dead").text


def test_behind_a_proxy_those_who_guess_are_told_apart(serve, caplog):
    guarded = serve(dashboard_token=TOKEN, dashboard_proxies="127.0.0.1")
    for _ in range(12):
        # what the client itself has written stands at the left
        said = {"X_Forwarded_For": "203.0.113.9, 198.51.100.7", "Authorization": f"Bearer {WRONG}"}
        answer = guarded.get("/", **said)
    assert answer.status == 429
    said["X_Forwarded_For"] = "198.51.100.7, 203.0.113.9"
    assert guarded.get("/", **said).status == 303
    form = {"token": guarded.get("/login").token, "secret": WRONG}
    assert guarded.post("/login", form, X_Forwarded_For="203.0.113.9").status == 401
    (told,) = [r for r in caplog.records if r.msg == "oncebridge.dashboard_login_refused"]
    assert told.peer == "203.0.113.9"


@pytest.mark.parametrize("peer", ["203.0.113.9", "::1", "10.0.0.1, 203.0.113.9"])
def test_a_program_on_this_machine_cannot_pass_for_others_by_a_header(serve, caplog, peer):
    visitor = serve(views(WHO), dashboard_token=TOKEN)  # no proxy is named, so none is believed
    for number in range(12):
        said = {"X_Forwarded_For": f"198.51.100.{number}, {peer}"}
        form = {"token": visitor.get("/login").token, "secret": WRONG}
        answer = visitor.post("/login", form, **said)
    assert answer.status == 429
    told = [r.peer for r in caplog.records if r.msg == "oncebridge.dashboard_login_refused"]
    assert told == ["127.0.0.1"] * 10


def test_a_session_ends_by_itself(serve):
    now = [NOW_MS]
    visitor = serve(views(WHO), clock=lambda: now[0], dashboard_token=TOKEN)
    visitor.log_in()
    now[0] += 12 * 3600 * 1000 - 1000
    assert visitor.get("/").status == 200
    now[0] += 1000
    assert visitor.get("/").status == 303


def test_a_restart_keeps_sessions_and_another_token_ends_them(serve):
    first = serve(views(WHO), dashboard_token=TOKEN)
    first.log_in()
    again = serve(views(WHO), dashboard_token=TOKEN)
    other = serve(views(WHO), dashboard_token=TOKEN + "2")
    (value,) = first.cookies.values()
    (name,) = first.cookies
    assert again.get("/", Cookie=f"{name}={value}").status == 200
    assert other.get("/", Cookie=f"{name}={value}").status == 303
    other.log_in(TOKEN + "2")
    (own,) = other.cookies
    assert own != name  # two dashboards on one host do not take each other's cookies
    assert other.get("/", Cookie=f"{own}={value}").status == 303


def test_logging_out_ends_the_session_for_whoever_has_its_cookie(guarded):
    guarded.log_in()
    kept = dict(guarded.cookies)
    assert "leaves=True" in guarded.get("/").text
    token = guarded.get("/").token if "Log out" in guarded.get("/").text else None
    assert token, "base.html has a form to log out"
    done = guarded.post("/logout", {"token": token})
    assert (done.status, done["Location"]) == (303, "/login")
    assert "Max-Age=0" in done["Set-Cookie"]
    assert guarded.cookies == {}
    assert Visitor(guarded.url, kept).get("/").status == 303


def log_out(visitor):
    """Log *visitor* out; give the answer, and somebody who has kept a copy of the cookie."""
    thief = Visitor(visitor.url, dict(visitor.cookies))
    return visitor.post("/logout", {"token": visitor.get("/").token}), thief


def test_a_log_out_outlasts_a_restart(tmp_path):
    setting = {"dashboard_token": TOKEN, "store": f"sqlite:{tmp_path}/seen.db"}
    with Alone(loaded(tmp_path, **setting), {}).up() as first:
        first.visitor.log_in()
        other = Visitor(first.visitor.url)
        other.log_in()
        _, thief = log_out(first.visitor)
        assert thief.get("/").status == 303
    with Alone(loaded(tmp_path, **setting), {}).up() as again:
        thief.url = other.url = again.visitor.url
        assert (thief.get("/").status, thief.get("/login").status) == (303, 200)
        assert other.get("/").status == 200  # who has not logged out stays in
        assert other.get("/login").status == 303


def test_a_log_out_holds_in_every_dashboard_on_the_store(serve):
    first, other = (serve(views(WHO), dashboard_token=TOKEN) for _ in range(2))
    first.log_in()
    assert Visitor(other.url, dict(first.cookies)).get("/").status == 200
    _, thief = log_out(first)
    thief.url = other.url
    assert thief.get("/").status == 303
    assert thief.post("/logout", {"token": "x.y"}).status == 401
    assert thief.get("/static/app.css").status == 200


class Away(SQLiteStore):
    """A store that does not answer for a while."""

    is_away = False

    async def peek(self, keys):
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().peek(keys)

    async def remember(self, memories):
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().remember(memories)


def test_while_the_store_is_away_only_those_who_are_known_are_let_in(serve, tmp_path):
    store = Away(tmp_path / "seen.db")
    first = serve(views(WHO), dashboard_token=TOKEN, store=store)
    elsewhere = serve(views(WHO), dashboard_token=TOKEN)
    elsewhere.log_in()
    stranger = Visitor(first.url, dict(elsewhere.cookies))
    first.log_in()
    store.is_away = True
    assert first.get("/").status == 200
    assert stranger.get("/").status == 303  # it may have been logged out of: nobody knows here
    assert stranger.get("/login").status == 200
    assert stranger.log_in().status == 303
    assert stranger.get("/").status == 200
    store.is_away = False
    again = Visitor(first.url, dict(elsewhere.cookies))
    assert again.get("/").status == 200
    store.is_away = True
    assert again.get("/").status == 200


def test_a_log_out_holds_after_many_others(serve, monkeypatch):
    monkeypatch.setattr("oncebridge.dashboard.sessions._MOST", 2)
    visitor = serve(views(WHO), dashboard_token=TOKEN)
    visitor.log_in()
    _, thief = log_out(visitor)
    for _ in range(5):
        Visitor(visitor.url).log_in()
    assert thief.get("/").status == 303
    # a program that has the token is let in all the same
    assert thief.get("/", Authorization=f"Bearer {TOKEN}").status == 200


def test_a_log_out_that_cannot_be_stored_holds_here_and_says_so(serve, tmp_path, caplog):
    store = Away(tmp_path / "seen.db")
    visitor = serve(views(WHO), dashboard_token=TOKEN, store=store)
    visitor.log_in()
    store.is_away = True
    answer, thief = log_out(visitor)
    assert (answer.status, visitor.cookies) == (503, {})
    assert "You are logged out of this browser" in answer.text
    assert "change dashboard_token" in answer.text
    assert "oncebridge.dashboard_logout_not_stored" in caplog.text
    assert thief.get("/").status == 303
    store.is_away = False
    assert thief.get("/").status == 303


def test_logging_out_takes_a_post_from_a_page_of_ours(guarded):
    guarded.log_in()
    assert guarded.get("/logout").status == 405
    assert guarded.post("/logout", {"token": "x.y"}).status == 403
    token = guarded.get("/").token
    assert guarded.post("/logout", {"token": token}, Origin="http://evil.example").status == 403
    assert guarded.get("/").status == 200


def test_whoever_is_in_is_not_asked_again(guarded):
    guarded.log_in()
    assert guarded.get("/login")["Location"] == "/"


@pytest.mark.parametrize("change", ["cut", "later", "other", "empty", "doubled"])
def test_a_cookie_that_was_not_written_here_lets_nobody_in(guarded, change):
    guarded.log_in()
    ((name, value),) = guarded.cookies.items()
    until, session, signature = value.split(".")
    forged = {
        "cut": f"{until}.{session}.{signature[:-1]}",
        "later": f"{int(until) + 1}.{session}.{signature}",
        "other": f"{until}.{session[::-1]}.{signature}",
        "empty": "",
        "doubled": f"{value}; {name}=x",
    }[change]
    assert guarded.get("/", Cookie=f"{name}={forged}").status == 303
    assert guarded.get("/", Cookie=f"{name}={value}").status == 200


def test_a_note_or_a_form_token_is_no_session(guarded):
    guarded.log_in()
    ((name, value),) = guarded.cookies.items()
    form = guarded.get("/").token
    for other in (form, value.partition(".")[2], value.replace(".", "", 1)):
        assert guarded.get("/", Cookie=f"{name}={other}").status == 303


def test_a_link_from_another_site_finds_the_session_all_the_same(guarded):
    # The browser leaves the cookie out; opened once more by our own page, it sends it.
    answer = guarded.get("/dead?x=%C3%BC", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert (answer.status, answer["Refresh"]) == (200, "0; url=/dead?x=%C3%BC")
    assert "letters" not in answer.text
    again = guarded.get("/dead?x=%C3%BC", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="navigate")
    assert again.status == 303


def test_the_trail_says_that_it_was_somebody_with_the_token(service, tmp_path):
    audit = tmp_path / "audit.ndjson"
    live, visitor = service(dashboard_write="true", dashboard_token=TOKEN, audit=str(audit))
    visitor.log_in()
    (number,) = bury(live, event(1))
    confirmed(visitor, "drop", "no such customer", number=number)
    (line,) = lines_of(audit)
    assert (line["verb"], line["user"]) == ("dead drop", "unknown (token)")


# --- programs -----------------------------------------------------------------------------


def test_a_program_sends_the_token_with_each_request(guarded):
    assert "user= leaves=False" in guarded.get("/", Authorization=f"Bearer {TOKEN}").text
    assert guarded.get("/", Authorization=f"bearer  {TOKEN}").status == 200
    assert guarded.get("/", Authorization=f"Bearer {TOKEN}", Host="any.example").status == 200
    for wrong in (f"Bearer {WRONG}", "Bearer", f"Basic {TOKEN}", TOKEN, ""):
        assert guarded.get("/", Authorization=wrong, Accept="*/*").status == 401


def test_a_program_without_a_token_is_told_so(guarded):
    for headers in ({"Accept": "application/json"}, {"Accept": None}, {"X_Live": "1"}):
        answer = guarded.get("/", **headers)
        assert (answer.status, answer["WWW-Authenticate"]) == (401, 'Bearer realm="oncebridge"')


def test_metrics_take_the_token_and_health_takes_none(service):
    _, visitor = service(dashboard_token=TOKEN)
    assert visitor.get("/metrics", Accept="*/*").status == 401
    assert visitor.get("/metrics", Authorization=f"Bearer {TOKEN}").status == 200
    assert visitor.get("/healthz", Host="whatever.example").text == '{"alive":true}'


# --- by a proxy's word ---------------------------------------------------------------------


@pytest.fixture
def proxied(serve):
    return serve(views(WHO), **PROXIED)


def test_a_proxy_names_people(proxied):
    assert (
        "user=ada@example.com leaves=False" in proxied.get(X_Forwarded_User="ada@example.com").text
    )
    assert "user=Jürgen" in proxied.get(X_Forwarded_User="Jürgen".encode().decode("latin-1")).text


@pytest.mark.parametrize("name", ["", " ", "x" * 257, "a\x01b", "a\x7fb", "\xff\xfe", None])
def test_what_is_no_name_lets_nobody_in(proxied, name):
    try:
        answer = proxied.get(X_Forwarded_User=name)
    except ValueError:
        pytest.fail("the test's own client refused")
    assert answer.status in (400, 401)
    assert "user=" not in answer.text


def test_two_names_are_no_name(proxied):
    both = {"X-Forwarded-User": "ada", "x-forwarded-user": "eve"}
    proxied.headers = both
    assert proxied.get().status == 401


def test_nobody_else_can_name_themselves(serve):
    visitor = serve(
        views(WHO), dashboard_user_header="X-Forwarded-User", dashboard_proxies="10.0.0.0/8"
    )
    answer = visitor.get(X_Forwarded_User="root", X_Forwarded_For="10.0.0.1")
    assert (answer.status, "Open the dashboard through the proxy" in answer.text) == (401, True)
    assert visitor.get("/login").status == 404


def test_a_header_names_nobody_where_it_was_not_asked_for(serve, guarded):
    assert guarded.get(X_Forwarded_User="root").status == 303
    assert "user= " in serve(views(WHO)).get(X_Forwarded_User="root").text


def test_with_both_either_will_do(serve):
    visitor = serve(views(WHO), dashboard_token=TOKEN, **PROXIED)
    named = visitor.get(X_Forwarded_User="ada", Authorization="Bearer of-somebody-else")
    assert "user=ada" in named.text
    assert visitor.get().status == 303
    visitor.log_in()
    assert "user= leaves=True" in visitor.get().text


# --- by being here -------------------------------------------------------------------------


def test_on_this_machine_alone_nobody_has_to_log_in(serve):
    visitor = serve(views(WHO))
    assert "user= leaves=False" in visitor.get().text
    assert visitor.get("/login").status == 404


async def test_what_stands_for_other_machines_too_is_not_opened(tmp_path, monkeypatch):
    from oncebridge.dashboard import DashboardData
    from oncebridge.errors import ConfigError

    setup = loaded(tmp_path, dashboard="localhost:0", store="memory:")
    dashboard = Dashboard(setup, DashboardData(setup, setup.config.store.opened))
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.7", 0))], raising=True
    )
    with pytest.raises(ConfigError, match="other machines can reach"):
        await dashboard.open()
