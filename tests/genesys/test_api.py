"""What is asked of Genesys, and how its answers are understood; against a server that plays it."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from tests.servers.genesys import CLIENT_ID, CLIENT_SECRET, playing_genesys
from tests.servers.process import free_port

from oncebridge.base.secrets import Secret
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.errors import ConfigError
from oncebridge.genesys.api import (
    PERMISSION,
    REGIONS,
    Api,
    ClientRefused,
    Exists,
    Hidden,
    Hosts,
    LookupFailed,
    Missing,
    is_conversation_id,
)

CALL = "7d1e2f00-0000-4000-8000-000000000001"
OTHER = "7d1e2f00-0000-4000-8000-000000000002"


@asynccontextmanager
async def asking(genesys, *, url="", secret=CLIENT_SECRET, seconds=5.0, rate=1000):
    api = Api(
        Hosts.of(url or genesys.url, "region"),
        Secret(CLIENT_ID),
        Secret(secret),
        timeout=timedelta(seconds=seconds),
        rate_limit=RateLimit(rate),
    )
    try:
        yield api
    finally:
        await api.aclose()


@pytest.fixture
def genesys():
    with playing_genesys(CALL) as found:
        yield found


async def test_a_conversation_is_there_or_it_is_not(genesys):
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        assert await api.find(OTHER) == Missing()
    assert genesys.asked == [f"/api/v2/conversations/{name}" for name in (CALL, OTHER)]
    assert genesys.logins == 1


async def test_an_address_below_a_path_is_asked_below_it(genesys):
    async with asking(genesys, url=f"{genesys.url}/proxy/genesys/") as api:
        assert await api.find(CALL) == Exists()
    assert genesys.asked == [f"/proxy/genesys/api/v2/conversations/{CALL}"]


async def test_what_stands_in_an_id_stays_in_its_place_in_the_path(genesys):
    async with asking(genesys) as api:
        assert await api.find("a/../b?c=d#é") == Missing()
    assert genesys.asked == ["/api/v2/conversations/a%2F..%2Fb%3Fc%3Dd%23%C3%A9"]


@pytest.mark.parametrize(
    "name", ["", " ", "..", ".", "a/b", "a b", "é", "x" * 101, 7, None, [], "-a"]
)
def test_what_cannot_be_an_id_is_not_worth_a_look_up(name):
    assert not is_conversation_id(name)
    assert is_conversation_id(CALL)
    assert is_conversation_id("x" * 100)


# --- the token ----------------------------------------------------------------------------


async def test_however_many_ask_one_token_is_fetched(genesys):
    genesys.login_delay = 0.1
    names = [f"{CALL[:-2]}{at:02d}" for at in range(20)]
    async with asking(genesys) as api:
        await asyncio.gather(*[api.find(name) for name in names])
    assert genesys.logins == 1
    assert sorted(genesys.known) == names


async def test_a_token_is_renewed_before_its_end(genesys):
    genesys.expires_in = 2
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        assert await api.find(CALL) == Exists()
        assert genesys.logins == 1
        await asyncio.sleep(1.7)
        assert await api.find(CALL) == Exists()
        assert genesys.logins == 2
    assert len(genesys.asked) == 3, "nothing was asked with a token that had ended"


@pytest.mark.parametrize("told", [None, "soon", -1, 0, True])
async def test_a_login_that_does_not_say_how_long_is_believed_for_a_while(genesys, told):
    genesys.told_life = told
    async with asking(genesys) as api:
        assert await api.log_in() is None
        until = api._token.until_s - asyncio.get_running_loop().time()
        assert 3500 < until <= 3540


async def test_a_token_that_is_not_taken_any_more_is_renewed_once(genesys):
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        genesys.revoke()
        assert await asyncio.gather(*[api.find(CALL) for _ in range(10)]) == [Exists()] * 10
    assert genesys.logins == 2


async def test_one_401_is_forgiven_and_two_in_a_row_are_a_refusal(genesys):
    async with asking(genesys) as api:
        genesys.refuses = 1
        assert await api.find(CALL) == Exists()
        assert genesys.logins == 2
        genesys.refuses = 2
        found = await api.find(CALL)
        assert isinstance(found, ClientRefused)
        assert "401" in found.reason
        assert await api.find(CALL) == Exists()


async def test_what_is_asked_again_after_a_401_waits_for_another_turn(genesys):
    async with asking(genesys, rate=2) as api:
        api._rate_limit.take(1, asyncio.get_running_loop().time())
        genesys.refuses = 1
        assert await api.find(CALL) == Exists()
    first, second = genesys.asked_at
    assert second - first > 0.3, "half a second, less the burst"


async def test_a_client_that_is_not_known_is_refused_and_nothing_secret_is_told(genesys):
    async with asking(genesys, secret="wr0ng") as api:
        found = await api.find(CALL)
        assert found == ClientRefused("the OAuth client is refused: HTTP 401 invalid_client")
        assert await api.log_in() == found
        assert not genesys.asked
        assert "wr0ng" not in repr(vars(api))
    async with asking(genesys) as api:
        await api.find(CALL)
        assert "t0ken" not in repr(vars(api))
        assert CLIENT_SECRET not in repr(vars(api))


async def test_a_login_in_trouble_is_an_outage_and_not_a_refusal(genesys):
    genesys.login_status = 503
    async with asking(genesys) as api:
        assert await api.find(CALL) == LookupFailed("the Genesys login answers HTTP 503")
        genesys.login_status, genesys.headers = 429, {"Retry-After": "7"}
        assert await api.find(CALL) == LookupFailed("the Genesys login answers HTTP 429", 7000)
        genesys.login_status = 200
        assert await api.find(CALL) == LookupFailed("the Genesys login returned no token")
        genesys.login_status = 0
        assert await api.find(CALL) == Exists()


# --- answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_not_there_is_what_genesys_itself_says_and_nobody_on_the_way(genesys, status):
    genesys.status = status
    async with asking(genesys) as api:
        assert await api.find(CALL) == Missing()
        for body in FOREIGN_ERRORS:
            genesys.body = body
            assert await api.find(CALL) == foreign(status)


FOREIGN_ERRORS = [
    *(b"", b"<html>Not found</html>", b"[]", b'"gone"', b"[" * 5000),
    b'{"message":"no Route matched with those values"}',
    b'{"error":"upstream misconfigured"}',
    b'{"code":"not.found","message":"Not Found"}',
    b'{"code":"not.found","status":502}',
    b'{"code":7,"status":404}',
]


def foreign(status):
    return LookupFailed(f"the Genesys API answers HTTP {status}, but not in its own format")


@pytest.mark.parametrize(
    "body", [b"<html>please log in</html>", b"", b"{}", b"[]", b'{"id":7}', b'{"id":"another"}']
)
async def test_it_is_there_if_it_is_shown_and_not_if_anything_is(genesys, body):
    genesys.status, genesys.body = 200, body
    async with asking(genesys) as api:
        assert await api.find(CALL) == foreign(200)
        genesys.body = json.dumps({"participants": [], "id": CALL.upper()}).encode()
        assert await api.find(CALL) == Exists()


@pytest.mark.parametrize("status", [201, 202, 204, 206])
async def test_no_other_success_shows_a_conversation(genesys, status):
    genesys.status, genesys.body = status, b""
    async with asking(genesys) as api:
        assert await api.find(CALL) == LookupFailed(f"the Genesys API answers HTTP {status}")


async def test_while_nothing_is_shown_the_client_lacks_a_permission_which_is_named(genesys):
    genesys.hidden.add(OTHER)
    async with asking(genesys) as api:
        for _ in range(2):
            found = await api.find(OTHER)
            assert isinstance(found, ClientRefused)
            assert PERMISSION in found.reason
        assert await api.find("not-there") == Missing()
        assert isinstance(await api.find(OTHER), ClientRefused), "what is not there is no proof"


async def test_one_that_is_not_shown_while_others_are_is_hidden(genesys):
    genesys.hidden.add(OTHER)
    async with asking(genesys) as api:
        for _ in range(2):
            assert await api.find(CALL) == Exists()
            assert await api.find(OTHER) == Hidden()
        genesys.revoke()
        assert isinstance(await api.find(OTHER), ClientRefused), (
            "nothing was shown to the new token"
        )
        assert await api.find(CALL) == Exists()
        assert await api.find(OTHER) == Hidden()


async def test_a_permission_that_is_taken_away_is_noticed(genesys):
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        genesys.status = 403
        for _ in range(20):
            assert await api.find(CALL) == Hidden()
        assert isinstance(await api.find(CALL), ClientRefused)
        genesys.status = 0
        assert await api.find(CALL) == Exists()


async def test_somebody_elses_403_is_neither(genesys):
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        genesys.status = 403
        for body in FOREIGN_ERRORS:
            genesys.body = body
            assert await api.find(CALL) == foreign(403)


@pytest.mark.parametrize("status", [301, 405, 408, 429, 500, 502, 503, 504])
async def test_all_else_says_nothing_about_the_conversation(genesys, status):
    genesys.status = status
    async with asking(genesys) as api:
        assert await api.find(CALL) == LookupFailed(f"the Genesys API answers HTTP {status}")


@pytest.mark.parametrize(
    ("text", "waits_ms"),
    [("12", 12_000), ("999999", 300_000), ("-5", 0), ("soon", 0), ("1" * 40, 0), ("", 0)],
)
async def test_it_is_heard_how_long_to_stay_away(genesys, text, waits_ms):
    genesys.status, genesys.headers = 429, {"Retry-After": text}
    async with asking(genesys) as api:
        assert await api.find(CALL) == LookupFailed("the Genesys API answers HTTP 429", waits_ms)


async def test_no_answer_is_told_in_words(genesys):
    async with asking(genesys, seconds=1) as api:
        assert await api.find(CALL) == Exists()
        genesys.delay = 3
        assert await api.find(CALL) == LookupFailed("the Genesys API did not answer within 1 s")
        genesys.delay, genesys.hangs_up = 0, True
        assert await api.find(CALL) == LookupFailed(
            "the Genesys API: connection closed without an answer"
        )
        genesys.hangs_up = False
        assert await api.find(CALL) == Exists()
    async with asking(genesys, url=f"http://127.0.0.1:{free_port()}") as api:
        assert await api.find(CALL) == LookupFailed("the Genesys login: connection refused")


async def test_a_long_conversation_is_there_too(genesys):
    genesys.status, genesys.body = 200, b'{"id": "%s", "x":"%s"}' % (CALL.encode(), LONG)
    async with asking(genesys) as api:
        assert await api.find(CALL.upper()) == Exists()
        for body in (b'{"id":"another","x":"%s"}', b'<p>"id":"' + CALL.encode() + b'"%s'):
            genesys.body = body % LONG
            assert await api.find(CALL) == foreign(200)


LONG = b"x" * 3_000_000


async def test_it_can_be_asked_again_after_it_was_closed(genesys):
    async with asking(genesys) as api:
        assert await api.find(CALL) == Exists()
        await api.aclose()
        await api.aclose()
        assert await api.find(CALL) == Exists()


# --- hosts --------------------------------------------------------------------------------


def test_a_region_is_a_host():
    assert Hosts.of("eu-central-1", "r") == Hosts(
        "https://login.mypurecloud.de", "https://api.mypurecloud.de"
    )
    assert Hosts.of("US-East-2", "r").api == "https://api.use2.us-gov-pure.cloud"
    assert Hosts.of("usw2.pure.cloud", "r").login == "https://login.usw2.pure.cloud"
    assert Hosts.of("new1.pure.cloud", "r").api == "https://api.new1.pure.cloud"
    assert len(set(REGIONS.values())) == len(REGIONS) == 18


def test_an_address_is_taken_as_it_is():
    found = Hosts.of("https://genesys.internal.example:8443/eu", "r")
    assert found.login == found.api == "https://genesys.internal.example:8443/eu"
    assert found.allow_private
    assert not Hosts.of("eu-west-1", "r").allow_private


@pytest.mark.parametrize(
    ("region", "says"),
    [
        ("eu-centrl-1", "did you mean 'eu-central-1'?"),
        ("Frankfurt am Main", "is neither a Region of Genesys Cloud nor a host; allowed: "),
        ("eu-west-9", "did you mean"),
        ("api.mypurecloud.de", "write only 'mypurecloud.de'"),
        ("login.usw2.pure.cloud", "write only"),
        ("-bad.example", "is neither"),
        ("a/b.example", "is neither"),
        ("mypurecloud.de:443", "is neither"),
        ("ftp://127.0.0.1", "start with https:// or http://"),
        ("http://genesys.example", "would send the secret unencrypted"),
        ("https://user:pass@genesys.example", "has a user or a query"),
        ("https://genesys.example/?a=b", "has a user or a query"),
    ],
)
def test_what_is_no_region_is_refused_with_a_hint(region, says):
    with pytest.raises(ConfigError) as caught:
        Hosts.of(region, "genesys.region")
    assert caught.value.where == "genesys.region"
    assert says in caught.value.message
    assert "pass" not in caught.value.message
