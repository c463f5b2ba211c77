"""Dead letters on the dashboard: seen, replayed and dropped over real HTTP; nothing is lost."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.aws.queues import TestQueue
from tests.dashboard.conftest import Answer, Visitor, loaded
from tests.http.live import Live, event
from tests.unit.test_dead_letters import letter

from oncebridge.base.clock import SystemDice
from oncebridge.dashboard import actions
from oncebridge.dashboard import dead_letters as letters
from oncebridge.dead_letters.api import DeadLetter
from oncebridge.dead_letters.file import FileDeadLetters
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.engine import pauses
from oncebridge.errors import StoreUnavailable
from oncebridge.operate.replay import DeadLetterFilter
from oncebridge.sinks.api import Never, No, Yes

NO = Never("no such customer")


def bury(live: Live, *raws: bytes) -> list[int]:
    """Let events arrive that the sink refuses, and give the numbers of their letters."""
    known = {one.number for one in live.buried()}
    live.sink.answer = NO
    live.do(lambda: live.service.router.process(list(raws)))
    live.sink.answer = Yes()
    return [one.number for one in live.buried() if one.number not in known]


def put(live: Live, *given: DeadLetter) -> None:
    live.do(lambda: live.setup.config.dead.opened.put(given))


def route_of(live: Live) -> str:
    return live.setup.routes[0].name


def listed(page: Answer) -> list[int]:
    """Give the numbers in the list, in its order."""
    return [int(found) for found in re.findall(r'<a class="target" href="/dead/(\d+)"', page.text)]


def told(page: Answer) -> str:
    """Give the words of a page."""
    main = page.text.partition("<main")[2].partition("</main>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", main))


def told_above(page: Answer) -> str:
    """Give the words above a page: the note about what was done."""
    return page.text.partition("<main")[0]


def confirmed(visitor: Visitor, do: str, because: str = "", **form: object) -> Answer:
    """Ask for something, and say yes."""
    asked = asked_for(visitor, do, **form)
    assert asked.status == 200, asked.headers
    more = {"token": asked.token, "letters": named(asked), "because": because}
    return visitor.post(f"/dead/{do}", more)


def asked_for(visitor: Visitor, do: str, **form: object) -> Answer:
    """Ask for something, and give the page that asks back."""
    token = visitor.get("/dead").token
    answer = visitor.post("/dead/confirm", {"token": token, "do": do, **form})
    assert answer.status == 303
    return visitor.get(dict(answer.headers)["Location"])


def named(page: Answer) -> str:
    """Give the letters that a page asks about, as its form names them; none where it has no form."""
    return next(iter(re.findall(r'name="letters" value="([^"]+)"', page.text)), "")


def marked(live: Live, *numbers: int) -> str:
    """Name letters as the form of a page would."""
    its = [one for one in live.buried() if one.number in numbers]
    return ",".join(f"{one.number}.{letters.fingerprint(one)}" for one in its)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- looking ------------------------------------------------------------------------------


def test_where_there_are_none_it_says_so(service):
    _, visitor = service(dashboard_write="true")
    page = visitor.get("/dead")
    assert page.status == 200
    assert "No dead letters." in page.text
    assert 'action="/dead/confirm"' not in page.text


def test_letters_are_listed_newest_first_with_why_and_which(service):
    live, visitor = service()
    first, second = bury(live, event(1)), bury(live, b"not json")
    page = visitor.get("/dead")
    assert listed(page) == [*second, *first]
    words = told(page)
    for word in ("rejected", "no such customer", "the sink rejected it permanently", "not-json"):
        assert word in words
    for word in (
        "Order Placed",
        "6f1c2a10-0000-4000-8000-000000000001",
        route_of(live),
        "not an event, 8 bytes",
    ):
        assert word in words
    assert "2 in total" in words


def test_letters_are_filtered_by_reason_and_route(service):
    live, visitor = service()
    kinds = [("rejected", "crm"), ("attempts", "crm"), ("rejected", "of old")]
    put(live, *[letter(n, reason=why, route=route) for n, (why, route) in enumerate(kinds * 3)])
    assert listed(visitor.get("/dead?reason=attempts")) == [8, 5, 2]
    assert listed(visitor.get("/dead?reason=rejected&route=of%20old")) == [9, 6, 3]
    assert "No matching dead letters." in visitor.get("/dead?reason=other").text
    assert listed(visitor.get("/dead?before=nonsense&other=1")) == list(range(9, 0, -1))


def test_a_page_has_fifty_and_older_ones_follow(service):
    live, visitor = service()
    put(live, *[letter(n, reason="rejected" if n % 2 else "attempts") for n in range(1, 121)])
    seen, path = [], "/dead?reason=rejected"
    while path:
        page = visitor.get(path)
        assert len(listed(page)) <= 50
        seen += listed(page)
        found = re.search(r'rel="next" href="([^"]+)"', page.text)
        path = found[1].replace("&amp;", "&") if found else ""
    assert seen == list(range(119, 0, -2))


class Counting:
    """Dead letters that count how often they are asked, and for how many."""

    def __init__(self, inner):
        self._inner = inner
        self.asked = 0
        self.given = 0

    async def list(self, *, after=0, limit=100):
        self.asked += 1
        found = await self._inner.list(after=after, limit=limit)
        self.given += len(found)
        return found


class Sparse:
    """Dead letters with numbers as a queue draws them: huge, and far apart."""

    def __init__(self, numbers: list[int]) -> None:
        self._letters = {n: letter(0, number=n, raw=b"{}") for n in sorted(numbers)}

    async def list(self, *, after=0, limit=100):
        return [one for n, one in self._letters.items() if n > after][:limit]


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1],
        [7],
        list(range(1, 2000)),
        [n * n * n * 8192 + 1 for n in range(1, 400)],
        [*range(1, 300), *range(10**15, 10**15 + 300)],
        [1, 10**17],
    ],
    ids=["none", "one", "seven", "dense", "sparse", "two heaps", "ends"],
)
async def test_all_letters_are_found_downwards_wherever_their_numbers_are(numbers):
    dead = Counting(Sparse(numbers))
    assert await letters.newest_number(dead) == max(numbers, default=0)
    found = [one.number async for piece in letters.newest_first(dead) for one in piece]
    assert found == sorted(numbers, reverse=True)
    assert dead.asked < 400


async def test_the_newest_of_many_cost_little(tmp_path):
    dead = SQLiteDeadLetters(tmp_path / "dead.db")
    await dead.put([letter(n) for n in range(20_000)])
    await dead.drop(list(range(100, 19_000)))
    counting = Counting(dead)
    page = await letters.page_of(counting, DeadLetterFilter(), None, 50)
    assert [one.number for one in page.letters] == list(range(20_000, 19_950, -1))
    assert counting.asked < 60
    assert counting.given < 400
    tally = await letters.count(dead)
    assert (tally.count, tally.more, tally.reasons) == (1100, False, {"rejected": 1100})
    await dead.aclose()


async def test_what_fits_rarely_is_looked_for_within_bounds(monkeypatch):
    monkeypatch.setattr(letters, "MOST_READ", 300)
    dead = MemoryDeadLetters()
    await dead.put([letter(n, reason="rare" if n == 0 else "usual") for n in range(1000)])
    page, before, looked = None, None, 0
    while page is None or not page.letters:
        page = await letters.page_of(dead, DeadLetterFilter(reason="rare"), before, 50)
        before, looked = page.older, looked + 1
    assert [one.number for one in page.letters] == [1]
    assert looked in (3, 4)
    tally = await letters.count(dead)
    assert tally.more
    assert 300 <= tally.count < 600
    found, more = await letters.oldest(dead, DeadLetterFilter(reason="usual"), 100, whole=2)
    assert (len(found), more) == (100, True)
    assert [bool(one.raw) for one in found[:4]] == [True, True, False, False]


@pytest.mark.parametrize("kind", ["memory", "sqlite", "file"])
async def test_every_kind_is_read_downwards(tmp_path, kind):
    kinds = {
        "memory": MemoryDeadLetters,
        "sqlite": lambda: SQLiteDeadLetters(tmp_path / "dead.db"),
        "file": lambda: FileDeadLetters(tmp_path / "dead.ndjson"),
    }
    dead = kinds[kind]()
    await dead.open()
    await dead.put([letter(n) for n in range(500)])
    await dead.drop([3, *range(100, 400), 500])
    expected = [n for n in range(499, 0, -1) if n != 3 and not 100 <= n < 400]
    assert [one.number async for piece in letters.newest_first(dead) for one in piece] == expected
    await dead.aclose()


def test_one_letter_is_shown_with_what_the_store_knows(service):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, event(7))
    page = visitor.get(f"/dead/{number}")
    words = told(page)
    assert page.status == 200
    for word in (
        "This event was not delivered: the sink rejected it permanently",
        "no such customer",
        route_of(live),
    ):
        assert word in words
    assert "The event with this key went to the dead letters" in words
    key = live.buried()[0].key.hex()
    assert f'href="/events/{key}"' in page.text
    assert "No actions recorded in the store." in words
    assert "Replay…" in words


def test_a_letter_that_is_not_there_is_not_found(service):
    _, visitor = service()
    for number in ("99", "0", "-1", "abc", "9" * 40, "1%2F2", "%D9%A3"):
        assert visitor.get(f"/dead/{number}").status == 404


# --- doing --------------------------------------------------------------------------------


def test_one_letter_is_replayed_once_that_is_confirmed(service, tmp_path):
    live, visitor = service(dashboard_write="true", audit=str(tmp_path / "audit.ndjson"))
    (number,) = bury(live, event(1))
    asked = asked_for(visitor, "replay", number=number)
    words = told(asked)
    assert "Replay 1 dead letter?" in words
    assert f"of route {route_of(live)}" in words
    assert live.sink.taken == []
    assert not (tmp_path / "audit.ndjson").exists()
    done = visitor.post(
        "/dead/replay",
        {"token": asked.token, "letters": named(asked), "because": "the CRM is back"},
    )
    assert "1 delivered" in told(done)
    assert live.sink.bodies == [event(1)]
    assert live.buried() == []
    (line,) = lines_of(tmp_path / "audit.ndjson")
    assert (line["verb"], line["user"], line["via"]) == ("dead replay", "unknown", "dashboard")
    assert (line["numbers"], line["reason"]) == ([number], "the CRM is back")
    assert visitor.get(f"/dead/{number}").status == 404


def test_ticked_letters_are_replayed_and_the_others_stay(service):
    live, visitor = service(dashboard_write="true")
    numbers = bury(live, *[event(n) for n in range(5)])
    done = confirmed(visitor, "replay", number=numbers[1:3])
    assert "2 delivered" in told(done)
    assert [one.number for one in live.buried()] == [numbers[0], *numbers[3:]]


def test_all_that_fit_are_replayed_in_several_requests(service, monkeypatch):
    monkeypatch.setattr(actions, "_MOST_IN_A_REQUEST", 30)
    live, visitor = service(dashboard_write="true")
    bury(live, *[event(n) for n in range(70)], b"not json")
    asked = asked_for(visitor, "replay", every="1", reason="rejected")
    assert "Replay 70 dead letters?" in told(asked)
    page, rounds = asked, 0
    while left := named(page):
        page = visitor.post("/dead/replay", {"token": page.token, "letters": left})
        rounds += 1
    assert rounds == 3
    assert sorted(live.sink.bodies) == sorted(event(n) for n in range(70))
    assert [one.reason for one in live.buried()] == ["not-json"]


def test_no_more_than_the_ceiling_are_asked_for_at_once(service, monkeypatch):
    monkeypatch.setattr("oncebridge.dashboard.views.dead.MOST_AT_A_TIME", 3)
    live, visitor = service(dashboard_write="true")
    numbers = bury(live, *[event(n) for n in range(5)])
    asked = asked_for(visitor, "drop", every="1")
    assert "Drop 3 dead letters?" in told(asked)
    assert "At most 3 are processed at a time" in told(asked)
    assert named(asked) == marked(live, *numbers[:3])


def test_letters_are_dropped_for_good(service, tmp_path):
    live, visitor = service(dashboard_write="true", audit=str(tmp_path / "audit.ndjson"))
    numbers, others = bury(live, event(1), event(2)), bury(live, b"not json")
    done = confirmed(visitor, "drop", "no such customers", number=numbers)
    assert "2 dropped" in told(done)
    assert [one.number for one in live.buried()] == others
    assert live.sink.taken == []
    (line,) = lines_of(tmp_path / "audit.ndjson")
    assert (line["verb"], line["reason"], len(line["keys"])) == (
        "dead drop",
        "no such customers",
        2,
    )


def test_the_trail_is_in_the_store_with_the_name_of_whoever_did_it(service, tmp_path):
    live, visitor = service(
        dashboard_write="true",
        dashboard_user_header="X-Forwarded-User",
        dashboard_proxies="127.0.0.1",
        audit=str(tmp_path / "audit.ndjson"),
    )
    visitor.headers["X-Forwarded-User"] = "zoe@example.com"
    (number,) = bury(live, event(1))
    live.sink.answer = NO
    assert "1 dead again" in told(confirmed(visitor, "replay", "try once more", number=number))
    (again,) = live.buried()
    words = told(visitor.get(f"/dead/{again.number}"))
    assert "dead replay" in words
    assert "zoe@example.com (dashboard on " in words
    assert "try once more" in words
    (line,) = lines_of(tmp_path / "audit.ndjson")
    assert line["user"] == "zoe@example.com"


def test_it_is_written_down_before_it_is_done_or_it_is_not_done(service, tmp_path):
    (tmp_path / "audit").mkdir()
    live, visitor = service(dashboard_write="true", audit=str(tmp_path / "audit"))
    numbers = bury(live, event(1), event(2))
    for verb in ("replay", "drop"):
        done = confirmed(visitor, verb, number=numbers)
        assert "so nothing was done" in told(done)
        past = "replayed" if verb == "replay" else "dropped"
        assert f"<h1>Nothing was {past}</h1>" in done.text
        assert "Try again" in told(done)
    assert live.sink.taken == []
    assert len(live.buried()) == 2


def test_what_dies_again_and_what_cannot_go_now_is_told(service):
    live, visitor = service(dashboard_write="true")
    numbers = bury(live, event(1), b"not json")
    live.sink.answer = No("the CRM is closed")
    words = told(confirmed(visitor, "replay", number=numbers))
    assert "1 kept" in words
    assert "the CRM is closed" in words
    assert "1 dead again" in words
    assert "kept" in words


def test_a_route_that_is_paused_or_gone_keeps_its_letters_and_says_so(service):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, event(1))
    put(live, replace(live.buried()[0], route="of old"))
    live.do(lambda: pauses.pause(live.store, [route_of(live)], SystemDice()))
    numbers = [number, number + 1]
    asked = asked_for(visitor, "replay", number=numbers)
    assert "the route is paused" in told(asked)
    assert "the route is no longer configured" in told(asked)
    words = told(confirmed(visitor, "replay", number=numbers))
    assert "the route is paused" in words
    assert "there is no route 'of old'" in words or "there is no route &#39;of old&#39;" in words
    assert len(live.buried()) == 2


def test_a_store_that_is_away_is_told_and_nothing_is_done(service, monkeypatch):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, event(1))
    token = visitor.get("/dead").token

    async def away(*_given: object, **_more: object):
        raise StoreUnavailable("the store is away for a while")

    monkeypatch.setattr(live.store, "now_ms", away)
    monkeypatch.setattr(live.store, "peek", away)
    shown = visitor.get(f"/dead/{number}")
    assert shown.status == 200
    assert "The store does not answer: the store is away for a while" in told(shown)
    done = visitor.post("/dead/replay", {"token": token, "letters": marked(live, number)})
    assert "Stopped: the store is away for a while" in told(done)
    assert len(live.buried()) == 1


def test_dead_letters_that_are_away_are_told(service, monkeypatch):
    live, visitor = service(dashboard_write="true")
    token = visitor.get("/rules").token

    async def away(*_given: object, **_more: object):
        raise StoreUnavailable("the disk is gone")

    monkeypatch.setattr(live.setup.config.dead.opened, "list", away)
    for path in ("/dead", "/dead/1"):
        page = visitor.get(path)
        assert page.status == 503
        assert "cannot be read: the disk is gone" in told(page)
    asked = visitor.get("/dead/confirm?do=drop&every=1")
    assert (asked.status, dict(asked.headers)["Location"]) == (303, "/dead")
    done = visitor.post("/dead/drop", {"token": token, "letters": "1.a,2.b"})
    assert "Stopped: the disk is gone" in told(done)


def test_a_double_submit_delivers_once(service):
    live, visitor = service(dashboard_write="true")
    numbers = bury(live, *[event(n) for n in range(20)])
    form = {"token": visitor.get("/dead").token, "letters": marked(live, *numbers)}
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(lambda _: visitor.post("/dead/replay", form), range(4)))
    assert [page.status for page in pages] == [200] * 4
    assert sorted(live.sink.bodies) == sorted(event(n) for n in range(20))
    assert live.buried() == []
    words = [told(page) for page in pages]
    assert sum("20 delivered" in text for text in words) == 1
    assert sum("20 already gone" in text for text in words) == 3


def test_a_sink_that_takes_its_time_keeps_nobody_waiting_for_ever(service, monkeypatch):
    monkeypatch.setattr(actions, "_TIME_S", 0.2)
    live, visitor = service(dashboard_write="true", batch="5")
    bury(live, *[event(n) for n in range(60)])
    live.sink.hold()
    threading.Timer(1.0, live.sink.let_go).start()
    done = confirmed(visitor, "replay", every="1")
    assert "35 remaining" in told(done)
    assert "Continue with the other 35" in told(done)
    assert len(live.buried()) == 35


def test_a_sink_that_takes_nothing_is_not_bothered_with_all_of_them(service):
    live, visitor = service(dashboard_write="true")
    bury(live, *[event(n) for n in range(80)])
    live.sink.answer = No("closed for today")
    words = told(confirmed(visitor, "replay", every="1"))
    assert "25 kept" in words
    assert "none of the last 25 could be replayed" in words
    assert "Try the other 55" in words


def test_a_page_from_before_a_restart_does_nothing_to_a_letter_that_has_its_number_now(service):
    live, visitor = service(dashboard_write="true", dead="memory:")
    (number,) = bury(live, event(1))
    asked = asked_for(visitor, "drop", number=number)
    of_old = named(asked)
    dead = live.setup.config.dead.opened
    live.do(lambda: dead.drop([number]))
    dead._last = 0  # as after a restart: numbers begin anew
    assert bury(live, event(2)) == [number]
    for verb in ("drop", "replay"):
        done = visitor.post(f"/dead/{verb}", {"token": asked.token, "letters": of_old})
        assert "<h1>Nothing was" in done.text
        assert "1 already gone" in told(done)
    assert [one.raw for one in live.buried()] == [event(2)]
    assert live.sink.bodies == []


# --- who may ------------------------------------------------------------------------------


def test_without_leave_there_are_no_buttons_and_no_way_round(service):
    live, visitor = service()
    (number,) = bury(live, event(1))
    for path in ("/dead", f"/dead/{number}"):
        page = visitor.get(path)
        assert 'name="do"' not in page.text
        assert 'type="checkbox"' not in page.text
        assert "dashboard_write = true" in told(page)
    token = visitor.get("/rules").token
    for path in ("/dead/confirm", "/dead/replay", "/dead/drop"):
        form = {"token": token, "do": "drop", "number": number, "letters": marked(live, number)}
        assert visitor.post(path, form).status == 403
    assert visitor.get(f"/dead/confirm?do=drop&numbers={number}").status == 404
    assert len(live.buried()) == 1


def test_a_form_of_somebody_else_is_refused(service):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, event(1))
    for path in ("/dead/confirm", "/dead/replay", "/dead/drop"):
        form = {"do": "drop", "number": number, "letters": marked(live, number)}
        assert visitor.post(path, form).status == 403
        assert visitor.post(path, form | {"token": "forged"}).status == 403
        assert visitor.get(path).status in (404, 405)
    assert len(live.buried()) == 1


def test_the_page_that_asks_has_an_address_to_come_back_to(service):
    live, visitor = service(dashboard_write="true")
    numbers = bury(live, event(1), event(2), event(3))
    address = f"/dead/confirm?do=drop&numbers={numbers[0]},{numbers[1]}"
    asked = visitor.get(address)
    assert "Drop 2 dead letters?" in told(asked)
    assert len(live.buried()) == 3, "to look does nothing"
    form = {"token": asked.token, "letters": named(asked)}
    assert "2 dropped" in told(visitor.post("/dead/drop", form))
    assert visitor.get(address).status == 303
    assert "these dead letters were already replayed or dropped" in told_above(visitor.get("/dead"))
    every = visitor.get("/dead/confirm?do=replay&every=1&reason=rejected")
    assert "Replay 1 dead letter?" in told(every)
    for query in ("", "?do=burn&every=1", "?do=drop", "?do=drop&numbers=x,-1,", "?numbers=1"):
        assert visitor.get(f"/dead/confirm{query}").status == 404


def test_input_that_is_no_event_is_of_the_same_route_on_every_page(service):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, b"not json")
    (buried,) = live.buried()
    assert not buried.rule
    assert told(visitor.get("/dead")).count(f" {buried.route} ") >= 1
    assert f"1 of route {buried.route}" in told(asked_for(visitor, "drop", number=number))
    replay = told(asked_for(visitor, "replay", number=number))
    assert "1 without a route or not readable: sent to every route" in replay


def test_what_was_not_said_is_not_done(service):
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, event(1))
    forms: list[dict[str, object]] = [
        {"do": "drop"},
        {"do": "burn", "number": number},
        {"number": number},
        {"do": "drop", "number": "x"},
        {"do": "drop", "number": [*range(1, 300)]},
    ]
    for form in forms:
        token = visitor.get("/dead").token
        answer = visitor.post("/dead/confirm", {"token": token, **form})
        assert answer.status == 303
        assert "Nothing was done" in visitor.get("/dead").text
    for text in ("", "x,y", ",,", "-1.a", "x.a", str(number), f"{number}."):
        token = visitor.get("/dead").token
        assert visitor.post("/dead/drop", {"token": token, "letters": text}).status == 303
    assert len(live.buried()) == 1


# --- strangers' words ---------------------------------------------------------------------

XSS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "javascript:alert(1)",
    "</textarea></pre><svg/onload=alert(1)>",
    "{{ 49 * 101 }}{% raw %}",
    "\x1b[2J\u202edesrever\x00",
)


def test_words_of_strangers_stay_words(service):
    live, visitor = service(dashboard_write="true", dashboard_payloads="true")
    for number, text in enumerate(XSS, 1):
        event_of_one = {
            "id": text,
            "source": text,
            "detail-type": text,
            "detail": {"conversationId": text, text: text, "orderId": text},
        }
        raw = json.dumps(event_of_one).encode()
        put(live, letter(1, raw=raw, reason=text, message=text, route=text, rule=text, key=b"k"))
        pages = [visitor.get("/dead"), visitor.get(f"/dead/{number}")]
        token = pages[0].token
        pages.append(asked_for(visitor, "replay", number=number))
        done = {"token": token, "letters": named(pages[-1]), "because": text}
        pages.append(visitor.post("/dead/replay", done))
        for page in pages:
            assert page.status == 200, text
            for seed in ("<script>alert", "<img src=x", "<svg/onload", "\x1b", "\u202e", "\x00"):
                assert seed not in page.text
            assert str(49 * 101) not in page.text
            assert 'href="javascript' not in page.text


def test_values_of_a_payload_are_not_shown_unless_allowed(service):
    canary = "canary-5b1e"
    detail = {"note": canary, "deep": [{"customer": canary}], "amount": 48151623}
    raw = event(1, detail=detail)
    live, visitor = service(dashboard_write="true")
    (number,) = bury(live, raw)
    pages = [visitor.get("/dead"), visitor.get(f"/dead/{number}")]
    token = pages[0].token
    pages.append(asked_for(visitor, "drop", number=number))
    pages.append(visitor.post("/dead/drop", {"token": token, "letters": named(pages[-1])}))
    for page in pages:
        assert canary not in page.text
        assert "48151623" not in page.text


def test_values_are_shown_where_that_is_allowed_but_for_what_is_masked(service):
    live, visitor = service(dashboard_payloads="true")
    (number,) = bury(live, event(1, detail={"state": "lost", "phoneNumber": "+49 555 0100"}))
    page = visitor.get(f"/dead/{number}")
    assert "lost" in page.text
    assert "555 0100" not in page.text


def test_what_is_masked_is_no_headline_either(service):
    live, visitor = service(mask="conversationId, id")
    (number,) = bury(live, event(1, id="canary-id", detail={"conversationId": "canary-entity"}))
    for path in ("/dead", f"/dead/{number}"):
        page = visitor.get(path)
        assert "Order Placed" in page.text
        assert "canary" not in page.text
    assert "Its first copy arrived on" in told(page)


# --- large ones ---------------------------------------------------------------------------


def test_a_list_does_not_look_into_large_letters_and_their_own_page_does(service):
    live, visitor = service(dashboard_write="true")
    large = event(1, detail={"text": "x" * 300_000})
    numbers = bury(live, large, event(2))
    pages = [visitor.get("/dead")]
    pages.append(asked_for(visitor, "drop", number=numbers))
    for page in pages:
        words = told(page)
        assert "large (300" in words
        assert "6f1c2a10-0000-4000-8000-000000000001" not in words
        assert "6f1c2a10-0000-4000-8000-000000000002" in words
    assert "6f1c2a10-0000-4000-8000-000000000001" in told(visitor.get(f"/dead/{numbers[0]}"))


async def test_a_list_looks_into_so_many_bytes_in_all_and_beside_the_loop(tmp_path, monkeypatch):
    threads = set()
    read = letters.events_in

    def noted(*given):
        threads.add(threading.current_thread())
        return read(*given)

    monkeypatch.setattr(letters, "events_in", noted)
    monkeypatch.setattr(letters, "_PARSED_BYTES", 2 * len(event(1)))
    its = [letter(0, number=n, raw=event(n)) for n in range(1, 5)]
    rows = await letters.DeadLetterRows(loaded(tmp_path).config).all(its)
    assert [row.is_read for row in rows] == [True, True, False, False]
    assert threads.isdisjoint({threading.current_thread()})
    assert len(threads) == 1


# --- beside workers elsewhere -------------------------------------------------------------


def test_beside_workers_elsewhere_the_same_files_are_used(serve, tmp_path):
    visitor: Visitor = serve(sink=f"file:{tmp_path / 'out.ndjson'}", dashboard_write="true")
    assert "No dead letters" in visitor.get("/dead").text
    assert not (tmp_path / "dead.db").exists()

    async def bury_elsewhere() -> None:
        dead = SQLiteDeadLetters(tmp_path / "dead.db")
        died = letter(1, raw=event(1), route="crm", rule="default", key=b"")
        await dead.put([died, replace(died, raw=event(2)), replace(died, raw=event(3))])
        await dead.aclose()

    asyncio.run(bury_elsewhere())
    assert listed(visitor.get("/dead")) == [3, 2, 1]
    assert "2 delivered" in told(confirmed(visitor, "replay", number=[1, 2]))
    assert (tmp_path / "out.ndjson").read_bytes().count(b"\n") == 2
    assert "1 dropped" in told(confirmed(visitor, "drop", number=3))
    assert "No dead letters" in visitor.get("/dead").text


def test_letters_in_another_process_are_out_of_reach(serve):
    visitor: Visitor = serve(dead="memory:", dashboard_write="true")
    page = visitor.get("/dead")
    assert page.status == 503
    assert "is inside the memory of the running service" in told(page)


def test_letters_in_memory_are_shown_by_the_process_that_has_them(service):
    live, visitor = service(dead="memory:", dashboard_write="true")
    (number,) = bury(live, event(1))
    assert listed(visitor.get("/dead")) == [number]
    assert "1 delivered" in told(confirmed(visitor, "replay", number=number))


def test_letters_in_a_queue_are_shown_with_what_looking_costs(service, ministack, monkeypatch):
    monkeypatch.setattr("oncebridge.dead_letters.sqs._WAIT_S", 0)
    queue = TestQueue(ministack.endpoint, MessageRetentionPeriod=14 * 86400)
    live, visitor = service(
        dead=queue.address, **{"dead.endpoint": queue.endpoint}, dashboard_write="true"
    )
    numbers = bury(live, event(1), event(2))
    page = visitor.get("/dead")
    assert sorted(listed(page)) == numbers
    assert "Reading a queue receives its messages" in told(page)
    assert "1 delivered" in told(confirmed(visitor, "replay", number=numbers[0]))
    assert "1 dropped" in told(confirmed(visitor, "drop", number=numbers[1]))
    assert live.buried() == []
