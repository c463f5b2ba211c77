"""Tokens of an identity provider: a real service, a real server of keys, real signatures."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import jwt as pyjwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from tests.http.live import event, live
from tests.http.provider import (
    AUDIENCE,
    CA,
    NOW_S,
    Provider,
    ec_key,
    jwk,
    providing,
    rsa_key,
    sign,
)
from tests.http.test_auth import Clock

from oncebridge.errors import ConfigError
from oncebridge.http import jwt as tokens
from oncebridge.http.jwt import JwtOptions, TokenVerifier
from oncebridge.service import config

ISSUER = "https://login.example.com/eu"
PRIMARY, SPARE, CURVE = rsa_key("primary"), rsa_key("spare"), ec_key("curve")
STRANGER = rsa_key("stranger")


def bearer(token):
    return [("Authorization", f"Bearer {token}")]


def send(running, number, token):
    return running.ask("POST", body=event(number), headers=bearer(token))


def unsigned(header, claims):
    parts = [json.dumps(part).encode() for part in (header, claims)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def with_hmac(key, **header):
    """Sign with a secret that everybody knows: the text of a public key."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "iat": NOW_S, "exp": NOW_S + 600}
    signed = unsigned({"alg": "HS256", "typ": "JWT", **header}, claims)
    made = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(made).decode().rstrip('=')}"


def pem(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def quick(monkeypatch):
    """Fetch when a token wants it, or after a failure, soon."""
    monkeypatch.setattr(tokens, "_LEAST_APART_S", 0.05)


def seen(log):
    return [(record.message, getattr(record, "reason", "")) for record in log.records]


# --- what is let in -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def provider():
    with providing(
        jwk(PRIMARY, "primary", alg="RS256"),
        jwk(SPARE, "spare"),
        jwk(CURVE, "curve", alg="ES256"),
        jwk(ec_key("wide", ec.SECP384R1), "wide"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def gate(tmp_path_factory, provider):
    settings = provider.settings(scope="events.write,events.read", claims__client_id="bridge")
    with live(tmp_path_factory.mktemp("gate"), clock=Clock(), **settings) as running:
        running.until(lambda: running.get("/readyz").status == 200)
        yield running


RIGHT = {"scope": "events.read profile events.write", "client_id": "bridge"}


@pytest.mark.parametrize(
    ("key", "alg", "kid"),
    [(PRIMARY, "RS256", "primary"), (SPARE, "PS256", "spare"), (CURVE, "ES256", "curve")],
)
def test_a_token_of_the_provider_lets_an_event_in(gate, key, alg, kid):
    answer = send(gate, int.from_bytes(kid.encode()[:3]), sign(key, alg, kid, **RIGHT))
    assert (answer.status, answer.verdicts) == (200, ["delivered"])


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": ["api://other", AUDIENCE]},
        {"scope": None, "scp": ["events.write", "events.read"]},  # as Okta writes them
        {"scope": None, "scp": "events.write events.read"},  # as Entra ID does
        {"client_id": ["other", "bridge"]},
        {"nbf": NOW_S + 60, "iat": NOW_S + 60},
        {"exp": NOW_S - 59, "iat": None},
        {"exp": NOW_S + 0.5},
    ],
    ids=str,
)
def test_claims_may_be_written_in_several_ways(gate, claims):
    answer = send(gate, 10, sign(PRIMARY, kid="primary", **{**RIGHT, **claims}))
    assert answer.status == 200


def test_an_event_is_refused_without_any_token_as_before(gate):
    answer = gate.ask("POST", body=event(1))
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="oncebridge"'


# --- what is refused ----------------------------------------------------------------------


def good(**claims):
    return sign(PRIMARY, kid="primary", **{**RIGHT, **claims})


def attack(**header):
    return sign(STRANGER, kid="primary", header=header, **RIGHT)


HEADER = {"typ": "JWT", "kid": "primary"}
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "iat": NOW_S, "exp": NOW_S + 600, **RIGHT}
WRONG = {
    # the algorithm
    "none": unsigned({**HEADER, "alg": "none"}, CLAIMS) + ".",
    "none, with a signature": unsigned({**HEADER, "alg": "none"}, CLAIMS) + ".AAAA",
    "None": unsigned({**HEADER, "alg": "None"}, CLAIMS) + "." + good().split(".")[2],
    "HS256 with the public PEM": with_hmac(pem(PRIMARY), kid="primary"),
    "HS256 with the public PEM, no kid": with_hmac(pem(PRIMARY)),
    "HS256 with the JWK": with_hmac(json.dumps(jwk(PRIMARY, "primary")).encode(), kid="primary"),
    "HS256 with nothing": with_hmac(b"", kid="primary"),
    "RS512, which is not allowed": sign(PRIMARY, "RS512", "primary", **RIGHT),
    "PS256 with a key for RS256": sign(PRIMARY, "PS256", "primary", iat=NOW_S - 90, **RIGHT),
    "ES256 with the name of an RSA key": sign(CURVE, "ES256", "primary", iat=NOW_S - 90, **RIGHT),
    "ES384 with its key": sign(ec_key("wide", ec.SECP384R1), "ES384", "wide", **RIGHT),
    "no algorithm": unsigned(HEADER, CLAIMS) + "." + good().split(".")[2],
    "alg is a list": unsigned({**HEADER, "alg": ["RS256"]}, CLAIMS) + "." + good().split(".")[2],
    # the key
    "another key": sign(STRANGER, kid="primary", **RIGHT),
    "the other key of the provider": sign(SPARE, kid="primary", **RIGHT),
    "a key it brings itself": attack(jwk=jwk(STRANGER, "primary")),
    "a key it says where to find": attack(jku="http://127.0.0.1:9/keys"),
    "a certificate it says where to find": attack(x5u="http://127.0.0.1:9/cert"),
    "a certificate it brings itself": attack(x5c=["MIIB"]),
    "no kid, and several keys fit": sign(PRIMARY, **RIGHT),
    "kid is a number": unsigned({**HEADER, "alg": "RS256", "kid": 1}, CLAIMS) + ".AAAA",
    "critical extensions": sign(PRIMARY, kid="primary", header={"crit": ["exp"]}, **RIGHT),
    # the claims
    "expired": good(exp=NOW_S - 60),
    "no expiry": good(exp=None),
    "expiry is a text": good(exp=str(NOW_S + 600)),
    "expiry is true": good(exp=True),
    "expiry is huge": good(exp=10**400),
    "expiry is no number": good(exp=float("nan")),
    "expiry is infinite": good(exp=float("inf")),
    "not valid yet": good(nbf=NOW_S + 61),
    "issued later": good(iat=NOW_S + 61),
    "issued at a text": good(iat="now"),
    "another issuer": good(iss="https://login.example.com/us"),
    "the issuer with a slash": good(iss=f"{ISSUER}/"),
    "the issuer in a list": good(iss=[ISSUER]),
    "no issuer": good(iss=None),
    "another audience": good(aud="api://other"),
    "part of the audience": good(aud="api://event"),
    "other audiences": good(aud=["api://other", f"{AUDIENCE}/more"]),
    "audience is an object": good(aud={AUDIENCE: 1}),
    "no audience": good(aud=None),
    "one scope only": good(scope="events.write"),
    "no scope": good(scope=None),
    "scopes that begin alike": good(scope="events.write.all events.read"),
    "another client": good(client_id="other"),
    "no client": good(client_id=None),
    "client is a number": good(client_id=1),
    # the form
    "not a token": "plum-token",
    "nothing": "",
    "two parts": good().rpartition(".")[0],
    "no signature": good().rpartition(".")[0] + ".",
    "four parts": good() + ".AAAA",
    "five parts": "a.b.c.d.e",
    "padded": good() + "==",
    "a blank inside": good().replace(".", ". ", 1),
    "too long": good(more="x" * 17_000),
    "claims in a list": unsigned({**HEADER, "alg": "RS256"}, [CLAIMS]) + ".AAAA",
    "claims too deep": ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=")
        for part in (b'{"alg":"RS256"}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"x")
    ),
}


@pytest.mark.parametrize("token", WRONG.values(), ids=WRONG)
def test_a_token_that_is_wrong_is_refused_and_touches_nothing(gate, provider, token):
    before = gate.counts, gate.store.asked.copy(), len(gate.buried()), provider.fetches
    answer = send(gate, 1, token)
    assert answer.status == 401
    challenge = 'Bearer realm="oncebridge"'
    assert answer.headers["www-authenticate"] in (challenge, f'{challenge}, error="invalid_token"')
    assert answer.headers["www-authenticate"] != challenge or not token
    assert before == (
        gate.counts,
        gate.store.asked.copy(),
        len(gate.buried()),
        provider.fetches,
    )


def test_two_authorization_headers_are_refused(gate):
    answer = gate.ask("POST", body=event(1), headers=[*bearer(good()), *bearer(good())])
    assert answer.status == 401


@pytest.fixture(scope="module")
def verifier(provider):
    """Give a verifier with the keys of the provider, which needs no loop any more."""

    async def fetched():
        made = TokenVerifier(
            [JwtOptions(issuer=ISSUER, jwks=provider.url, audience=(AUDIENCE,), ca_file=CA)],
            Clock(),
        )
        made.open()
        async with asyncio.timeout(10):
            while not made.has_keys:  # noqa: ASYNC110 - the provider is in another thread
                await asyncio.sleep(0.01)
        await made.aclose()
        return made

    return asyncio.run(fetched())


SIGNED = {
    "RS256": sign(PRIMARY, kid="primary").encode(),
    "PS256": sign(SPARE, "PS256", "spare").encode(),
    "ES256": sign(CURVE, "ES256", "curve").encode(),
}


@pytest.mark.parametrize("token", SIGNED.values(), ids=SIGNED)
@given(data=st.data())
def test_a_token_that_was_changed_in_any_byte_is_refused(verifier, token, data):
    assert verifier.judge(token) is None
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != token[at]))
    assert verifier.judge(token[:at] + bytes([other]) + token[at + 1 :]) is not None


@pytest.mark.parametrize("token", SIGNED.values(), ids=SIGNED)
def test_no_other_last_letter_is_the_same_signature(verifier, token):
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    accepted = [one for one in letters if verifier.judge(token[:-1] + bytes([one])) is None]
    assert accepted == [token[-1]]


@given(st.binary(max_size=200) | st.from_regex(rb"[A-Za-z0-9_-]{1,60}(\.[A-Za-z0-9_-]{1,60}){2}"))
def test_whatever_arrives_it_is_refused_and_nothing_is_raised(verifier, token):
    assert verifier.judge(token).is_final


def test_a_token_is_verified_once_and_refused_when_it_expires(provider, verifier, monkeypatch):
    clock = verifier._clock
    verified = []
    verify = tokens._PublicKey.verifies
    monkeypatch.setattr(
        tokens._PublicKey, "verifies", lambda key, token: verified.append(1) or verify(key, token)
    )
    token = sign(PRIMARY, kid="primary", sub="once").encode()
    assert [verifier.judge(token) for _ in range(5)] == [None] * 5
    assert len(verified) == 1
    clock.now_s += 3600 + 59
    try:
        assert verifier.judge(token) is None  # within the leeway
        clock.now_s += 1
        assert verifier.judge(token).reason == "it has expired (exp)"
    finally:
        clock.now_s = NOW_S


def test_the_tokens_that_are_remembered_have_a_limit(verifier, monkeypatch):
    monkeypatch.setattr(tokens, "_MOST_VERIFIED", 3)
    for number in range(10):
        assert verifier.judge(sign(CURVE, "ES256", "curve", sub=str(number)).encode()) is None
        assert len(verifier._verified) <= 3


# --- which keys count ---------------------------------------------------------------------


def judged(token, *keys, **options):
    """Judge *token* with the set of *keys*, as it is read from an answer."""
    usual = {"issuer": ISSUER, "jwks": "https://login.example.com/keys", "audience": (AUDIENCE,)}
    verifier = TokenVerifier([JwtOptions(**{**usual, **options})], Clock())
    answer = tokens.ClientResponse(200, {}, json.dumps({"keys": keys}).encode())
    (only,) = verifier._providers
    only._keys, only._fetched = only._read_set(answer), 1
    refused = verifier.judge(token.encode())
    return "" if refused is None else refused.reason


def test_a_token_that_names_no_key_needs_exactly_one_that_fits():
    token = sign(PRIMARY)
    assert not judged(token, jwk(PRIMARY, "primary"))
    assert not judged(token, jwk(PRIMARY), jwk(CURVE, "curve"))
    assert "several keys" in judged(token, jwk(PRIMARY, "primary"), jwk(SPARE, "spare"))
    assert "no key" in judged(token, jwk(CURVE, "curve"))


def test_two_keys_of_one_name_are_told_apart_by_the_algorithm_or_tried_both():
    both = jwk(PRIMARY, "same"), jwk(CURVE, "same"), jwk(SPARE, "same")
    assert not judged(sign(PRIMARY, kid="same"), *both)
    assert not judged(sign(SPARE, kid="same"), *both)
    assert not judged(sign(CURVE, "ES256", "same"), *both)
    assert "signature" in judged(sign(STRANGER, kid="same"), *both)


UNFIT = {
    "for encryption": jwk(PRIMARY, "k", use="enc"),
    "to sign with": jwk(PRIMARY, "k", key_ops=["sign"]),
    "key_ops is a number": jwk(PRIMARY, "k", key_ops=1),
    "for another algorithm": jwk(PRIMARY, "k", alg="RS512"),
    "for HS256": jwk(PRIMARY, "k", alg="HS256"),
    "private": {
        **json.loads(pyjwt.algorithms.RSAAlgorithm.to_jwk(PRIMARY)),
        **jwk(PRIMARY, "k", key_ops=["verify"]),
    },
    "a secret": {"kty": "oct", "k": "AAAA", "kid": "k", "alg": "RS256"},
    "of no kind": {"kid": "k", "n": "AQAB", "e": "AQAB"},
    "without a modulus": {"kty": "RSA", "kid": "k", "e": "AQAB"},
    "nonsense": {"kty": "RSA", "kid": "k", "n": "!", "e": "AQAB"},
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_a_key_that_is_not_for_signatures_of_this_kind_is_left_out(unfit):
    token = sign(PRIMARY, kid="k")
    assert judged(token, unfit) == "no key of the provider fits it"
    assert not judged(sign(CURVE, "ES256", "curve"), unfit, jwk(CURVE, "curve"))  # others count


@pytest.mark.filterwarnings("ignore:.*key.*:UserWarning")
def test_a_short_key_and_a_key_on_another_curve_are_left_out():
    short, wide = rsa_key("short", 1024), ec_key("wide", ec.SECP384R1)
    assert "no key" in judged(sign(short, kid="k"), jwk(short, "k"))
    assert "no key" in judged(sign(CURVE, "ES256", "k"), jwk(wide, "k"))
    assert "no key" in judged(sign(CURVE, "ES256", "k"), jwk(wide, "k", alg="ES256"))
    odd = ec_key("odd", ec.SECP256K1)
    assert "no key" in judged(sign(CURVE, "ES256", "k"), jwk(odd, "k"))


def test_more_algorithms_can_be_allowed_and_fewer():
    wide = ec_key("wide", ec.SECP384R1)
    assert not judged(sign(wide, "ES384", "w"), jwk(wide, "w"), algorithms=("ES384",))
    assert not judged(sign(PRIMARY, "RS512", "p"), jwk(PRIMARY, "p"), algorithms=("RS512",))
    assert "algorithm" in judged(sign(PRIMARY, kid="p"), jwk(PRIMARY, "p"), algorithms=("ES256",))


def test_without_an_audience_only_tokens_that_have_none_are_accepted():
    options = {"audience": (), "claims": {"client_id": ("bridge",)}}  # as with Cognito
    keys = jwk(PRIMARY, "p")
    assert not judged(sign(PRIMARY, kid="p", aud=None, client_id="bridge"), keys, **options)
    assert "aud" in judged(sign(PRIMARY, kid="p", client_id="bridge"), keys, **options)
    assert "client_id" in judged(sign(PRIMARY, kid="p", aud=None), keys, **options)


# --- keys that change ---------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_new_key_is_fetched_when_a_token_names_it(tmp_path):
    with (
        providing(jwk(PRIMARY, "old")) as provider,
        live(tmp_path, clock=Clock(), **provider.settings()) as running,
    ):
        running.until(lambda: send(running, 1, sign(PRIMARY, kid="old")).status == 200)
        fetches = provider.fetches
        provider.hold()
        provider.keys.append(jwk(SPARE, "new"))
        token = sign(SPARE, kid="new")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: send(running, number, token), range(100, 140)))
        assert {(answer.status, answer.retry_after) for answer in answers} == {(503, 1)}
        running.until(lambda: provider.fetches > fetches)
        assert provider.fetches == fetches + 1  # all of them wait for the same one
        assert send(running, 2, sign(PRIMARY, kid="old")).status == 200  # and nobody else does
        provider.let_go()
        running.until(lambda: send(running, 3, token).status == 200)
        assert send(running, 4, sign(PRIMARY, kid="old")).status == 200


def test_tokens_with_invented_keys_do_not_make_us_ask_again_and_again(tmp_path, monkeypatch):
    assert tokens._LEAST_APART_S == 30
    monkeypatch.setattr(tokens, "_LEAST_APART_S", 3600.0)  # however slow this machine is
    with (
        providing(jwk(PRIMARY, "old")) as provider,
        live(tmp_path, clock=Clock(), **provider.settings()) as running,
    ):
        running.until(lambda: send(running, 1, sign(PRIMARY, kid="old")).status == 200)
        invented = [sign(CURVE, "ES256", f"invented-{number}") for number in range(60)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda token: send(running, 2, token), invented))
        assert {answer.status for answer in answers} == {503}
        assert provider.fetches == 1
        assert send(running, 3, sign(PRIMARY, kid="old")).status == 200


@pytest.mark.usefixtures("quick")
def test_a_key_that_was_removed_is_not_accepted_any_more(tmp_path):
    clock = Clock()
    with (
        providing(jwk(PRIMARY, "old"), jwk(SPARE, "new")) as provider,
        live(tmp_path, clock=clock, **provider.settings()) as running,
    ):
        token = sign(PRIMARY, kid="old", exp=NOW_S + 86_400)
        running.until(lambda: send(running, 1, token).status == 200)
        provider.keys.pop(0)
        clock.now_s += 120
        send(running, 2, sign(STRANGER, kid="unknown", iat=clock.now_s))  # so that it fetches
        running.until(lambda: send(running, 3, token).status == 401)
        assert send(running, 4, sign(SPARE, kid="new")).status == 200


@asynccontextmanager
async def asking(provider):
    """Give a verifier, what moves its clock, and what fetches its keys once."""
    clock = Clock()
    options = JwtOptions(issuer=ISSUER, jwks=provider.url, audience=(AUDIENCE,))
    made = TokenVerifier([options], clock)
    (only,) = made._providers
    client = only._client()
    try:
        yield made, clock, lambda: only._refresh(client)
    finally:
        await client.aclose()


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        ({"Cache-Control": "public, max-age=0"}, 60),
        ({"Cache-Control": "max-age=300, must-revalidate"}, 300),
        ({"Cache-Control": 'private, Max-Age="900"'}, 900),
        ({"Cache-Control": "max-age=86400"}, 3600),
        ({"Cache-Control": "s-maxage=5"}, 600),
        ({"Cache-Control": "no-store"}, 600),
        ({}, 600),
    ],
    ids=str,
)
async def test_keys_are_kept_as_long_as_the_provider_says_within_bounds(said, is_kept):
    with providing(jwk(PRIMARY, "p"), tls=False) as provider:
        provider.headers = said
        async with asking(provider) as (_, _, refresh):
            assert await refresh() == is_kept
    (path, headers), *_ = provider.asked
    assert (path, headers["Accept"]) == ("/eu/keys", "application/json")


def test_keys_are_fetched_again_when_they_are_due(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_LEAST_APART_S", 0.05)
    monkeypatch.setattr(tokens, "_KEPT_S", (0.05, 0.05, 0.05))
    clock = Clock()
    with (
        providing(jwk(PRIMARY, "old")) as provider,
        live(tmp_path, clock=clock, **provider.settings()) as running,
    ):
        running.until(lambda: provider.fetches > 3)
        token = sign(PRIMARY, kid="old", exp=NOW_S + 86_400)
        assert send(running, 1, token).status == 200
        clock.now_s += 120
        provider.keys[:] = [jwk(SPARE, "new")]
        running.until(lambda: send(running, 2, token).status == 401)
        assert send(running, 3, sign(SPARE, kid="new")).status == 200


# --- a provider that does not answer ------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_without_the_provider_the_known_keys_stay_valid(tmp_path, caplog):
    caplog.set_level(logging.INFO, "oncebridge")
    with (
        providing(jwk(PRIMARY, "old")) as provider,
        live(tmp_path, clock=Clock(), **provider.settings()) as running,
    ):
        running.until(lambda: send(running, 1, sign(PRIMARY, kid="old")).status == 200)
        assert running.get("/readyz").json == {"ready": True}
        provider.stop()
        new = sign(SPARE, kid="new")
        assert send(running, 2, new).status == 503
        warning = ["jwt: the keys of the identity provider cannot be renewed"]
        ready = {"ready": True, "warnings": warning}
        running.until(lambda: running.get("/readyz").json == ready)
        assert running.get("/readyz").status == 200
        assert send(running, 3, sign(PRIMARY, kid="old", sub="another")).status == 200
        assert send(running, 4, new).status == 503  # it may be signed with a key we cannot get
        provider.keys.append(jwk(SPARE, "new"))
        provider.start()
        running.until(lambda: send(running, 5, new).status == 200)
        running.until(lambda: running.get("/readyz").json == {"ready": True})
        provider.stop()
    unavailable = [r for r in caplog.records if r.message == "oncebridge.jwt_keys_unavailable"]
    assert len(unavailable) == 1  # once a minute, and the clock stands still
    assert unavailable[0].what == "the known keys stay valid"
    assert unavailable[0].host == "localhost"
    fetched = [r for r in caplog.records if r.message == "oncebridge.jwt_keys_fetched"]
    assert [record.keys for record in fetched] == [1, 2]


def test_a_service_starts_without_its_provider_and_says_what_is_missing(tmp_path):
    provider = Provider()
    provider.start()
    provider.stop()
    with live(tmp_path, clock=Clock(), **provider.settings()) as running:
        answer = send(running, 1, sign(PRIMARY, kid="old"))
        assert (answer.status, answer.retry_after) == (503, 1)
        assert send(running, 1, sign(PRIMARY, kid="old", aud="api://other")).status == 401
        assert running.ask("POST", body=event(1)).status == 401
        ready = running.get("/readyz")
        reasons = ["jwt: the keys of the identity provider are not known yet"]
        assert (ready.status, ready.json) == (503, {"ready": False, "reasons": reasons})
        assert running.do(running.service._not_ready) == reasons
        assert running.get("/healthz").status == 200
        provider.keys = [jwk(PRIMARY, "old")]
        provider.start()
        running.until(lambda: send(running, 2, sign(PRIMARY, kid="old")).status == 200, 20)
        assert running.get("/readyz").json == {"ready": True}
        provider.stop()


def test_other_senders_do_not_need_the_provider(tmp_path):
    provider = Provider()
    provider.start()
    provider.stop()
    with live(
        tmp_path, clock=Clock(), source__api_keys="apple-key-of-a-mill", **provider.settings()
    ) as running:
        answer = running.ask("POST", body=event(1), headers={"x-api-key": "apple-key-of-a-mill"})
        assert answer.verdicts == ["delivered"]
        ready = running.get("/readyz")
        assert ready.status == 200
        assert ready.json["warnings"]
        assert send(running, 2, sign(PRIMARY, kid="old")).status == 503


NO_SETS = {
    "a page": (200, b"<html>log in</html>", {}),
    "nothing": (200, b"", {}),
    "no keys": (200, b"{}", {}),
    "keys in an object": (200, b'{"keys": {}}', {}),
    "keys that are texts": (200, b'{"keys": ["a"]}', {}),
    "not UTF-8": (200, b'{"keys": [{"kid": "\xff"}]}', {}),
    "too deep": (200, b'{"keys": [{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", {}),
    "too large": (200, b'{"keys": []}' + b" " * 256 * 1024, {}),
    "too many": (200, json.dumps({"keys": [{"kid": str(n)} for n in range(101)]}).encode(), {}),
    "elsewhere": (302, b"", {"Location": "/keys"}),
    "not found": (404, b"{}", {}),
    "an error": (500, b'{"keys": []}', {}),
    "half": (200, b'{"keys"', {"Content-Length": "1000"}),
}


@pytest.mark.parametrize("answer", NO_SETS.values(), ids=NO_SETS)
async def test_an_answer_that_is_no_set_of_keys_changes_nothing(answer, caplog):
    token = sign(PRIMARY, kid="p").encode()
    with providing(jwk(PRIMARY, "p"), tls=False) as provider:
        usual = provider.status, provider.body, provider.headers
        async with asking(provider) as (made, clock, refresh):
            for known in (False, True):
                provider.status, provider.body, provider.headers = answer
                await refresh()
                refused = made.judge(token)
                assert (refused is None) == known
                assert known or not refused.is_final
                assert made.warnings()
                provider.status, provider.body, provider.headers = usual
                await refresh()
                assert made.judge(token) is None
                assert not made.warnings()
                clock.now_s += 60
    assert [record.message for record in caplog.records] == ["oncebridge.jwt_keys_unavailable"] * 2


async def test_an_empty_set_means_that_no_key_is_valid_any_more():
    token = sign(PRIMARY, kid="p").encode()
    with providing(jwk(PRIMARY, "p"), tls=False) as provider:
        async with asking(provider) as (made, clock, refresh):
            await refresh()
            assert made.judge(token) is None
            provider.keys.clear()
            clock.now_s += 120
            await refresh()
            assert not made.judge(token).is_final  # perhaps it was a mistake
            assert made.warnings() == [
                "jwt: the identity provider publishes no key that can be used"
            ]
            await refresh()
            assert made.judge(token).is_final


async def test_a_key_that_is_missed_is_looked_for_again_before_its_tokens_are_refused():
    # Issued long ago: a cache before the provider may be late, and some date tokens back.
    token = sign(STRANGER, kid="../../dev/null", iat=NOW_S - 300, exp=NOW_S + 600).encode()
    with providing(jwk(PRIMARY, "p"), tls=False) as provider:
        async with asking(provider) as (made, _, refresh):
            await refresh()
            for _ in range(3):
                assert not made.judge(token).is_final
            await refresh()
            for _ in range(3):
                assert made.judge(token).is_final
            provider.keys.append(jwk(STRANGER, "../../dev/null"))
            await refresh()
            assert made.judge(token) is None


def test_a_provider_that_never_answers_is_left_in_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokens, "_FETCH_S", 0.2)
    with providing(jwk(PRIMARY, "p")) as provider:
        provider.hold()
        with live(tmp_path, clock=Clock(), **provider.settings()) as running:
            running.until(lambda: ("oncebridge.jwt_keys_unavailable", "") in seen(caplog))
            assert send(running, 1, sign(PRIMARY, kid="p")).status == 503
            provider.let_go()
            running.until(lambda: send(running, 2, sign(PRIMARY, kid="p")).status == 200, 20)
    assert [r.error for r in caplog.records if hasattr(r, "error")] == ["no answer within 0.2 s"]


def test_a_service_stops_while_it_waits_for_the_provider(tmp_path):
    with providing(jwk(PRIMARY, "p")) as provider:
        provider.hold()
        with live(tmp_path, clock=Clock(), **provider.settings()) as running:
            running.until(lambda: provider.fetches == 1)
            (waiting,) = running.service.sources[0]._guard._jwt._providers
            assert waiting._task is not None
        assert running.drained
        assert waiting._task is None  # ended by the source, and not with the loop


def test_a_provider_that_cannot_prove_who_it_is_is_not_believed(tmp_path, caplog):
    settings = {}
    with providing(jwk(PRIMARY, "p")) as provider:
        settings = provider.settings()
        del settings["source__jwt__ca_file"]
        with live(tmp_path, clock=Clock(), **settings) as running:
            running.until(lambda: ("oncebridge.jwt_keys_unavailable", "") in seen(caplog))
            assert send(running, 1, sign(PRIMARY, kid="p")).status == 503
        assert provider.fetches == 0


def test_a_private_address_needs_a_word(tmp_path, caplog):
    with live(
        tmp_path,
        source__jwt__issuer=ISSUER,
        source__jwt__audience=AUDIENCE,
        source__jwt__jwks="https://192.0.2.1/keys",
    ) as running:
        running.until(lambda: ("oncebridge.jwt_keys_unavailable", "") in seen(caplog))
    assert "allow_private" in caplog.records[0].error


# --- several, and what is logged ----------------------------------------------------------


def test_each_of_several_providers_vouches_for_its_own_tokens_only(tmp_path):
    with providing(jwk(PRIMARY, "k")) as one, providing(jwk(SPARE, "k")) as other:
        file = tmp_path / "oncebridge.toml"
        file.write_text(
            f"""
            [source]
            url = "http://127.0.0.1:0/events"
            [[source.jwt]]
            issuer = "https://one.example.com"
            jwks = "{one.url}"
            audience = ["api://events", "api://old"]
            ca_file = "{CA}"
            [[source.jwt]]
            issuer = "https://other.example.com"
            jwks = "{other.url}"
            audience = "api://events"
            ca_file = "{CA}"
            """
        )
        setup = config.load(file, environment={})
        source = setup.config.source[0].options
        assert [one.audience for one in source.jwt] == [("api://events", "api://old"), (AUDIENCE,)]

        async def judged():
            made = TokenVerifier(source.jwt, Clock())
            made.open()
            async with asyncio.timeout(10):
                while made.warnings():  # noqa: ASYNC110 - the providers are in other threads
                    await asyncio.sleep(0.01)
            await made.aclose()
            return {
                (name, issuer): made.judge(
                    sign(key, kid="k", iss=f"https://{issuer}.example.com").encode()
                )
                is None
                for name, key in (("one", PRIMARY), ("other", SPARE))
                for issuer in ("one", "other")
            }

        accepted = asyncio.run(judged())
        assert accepted == {pair: pair[0] == pair[1] for pair in accepted}


def test_refusals_are_logged_with_their_reason_once_a_minute_and_without_the_token(
    tmp_path, provider, caplog
):
    caplog.set_level(logging.DEBUG)
    clock = Clock()
    with live(tmp_path, clock=clock, **provider.settings()) as running:
        running.until(lambda: running.get("/readyz").status == 200)
        expired, other = good(exp=NOW_S - 100), good(aud="api://secret-audience")
        for _ in range(3):
            assert send(running, 1, expired).status == 401
        assert send(running, 1, other).status == 401
        clock.now_s += 60
        assert send(running, 1, expired).status == 401
    refused = [
        (record.reason, record.refused)
        for record in caplog.records
        if record.message == "oncebridge.http_token_refused"
    ]
    assert refused == [
        ("it has expired (exp)", 1),
        ("it is for another audience (aud)", 1),
        ("it has expired (exp)", 3),
    ]
    everything = "\n".join(str(vars(record)) for record in caplog.records)
    parts = [part for token in (expired, other) for part in token.split(".")]
    assert not [part for part in [*parts, "secret-audience"] if part in everything]


# --- settings -----------------------------------------------------------------------------


def load(environment=(), **settings):
    usual = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": "https://login.example.com/keys"}
    named = {name: text for name, text in {**usual, **settings}.items() if text is not None}
    flags = {
        "source": "http://0.0.0.0:8080/events",
        "store": "memory:",
        **{f"source.jwt.{name}": text for name, text in named.items()},
    }
    return config.load(None, environment=dict(environment), flags=flags)


def test_a_source_with_a_provider_may_listen_to_others():
    (place,) = load().config.source
    (options,) = place.options.jwt
    assert options.algorithms == ("RS256", "ES256", "PS256")


def test_a_list_from_the_environment_has_commas():
    (place,) = load({"ONCEBRIDGE_SOURCE__JWT__SCOPE": "a,b"}, audience="x, y").config.source
    (options,) = place.options.jwt
    assert (options.scope, options.audience) == (("a", "b"), ("x", "y"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"issuer": None}, "source.jwt.issuer: is missing"),
        ({"jwks": None}, "source.jwt.jwks: is missing"),
        ({"jwks": "http://login.example.com/keys"}, "source.jwt.jwks: .*use https://"),
        ({"jwks": "https://mill:grain@login.example.com/keys"}, "source.jwt.jwks: .* has a user"),
        ({"jwks": "login.example.com/keys"}, "source.jwt.jwks: the URL must start with https://"),
        ({"audience": None}, "source.jwt.audience: is missing: tokens for other services"),
        ({"algorithms": "HS256"}, "must be one of RS256"),
        ({"algorithms": "none"}, "must be one of RS256"),
        ({"leeway": "6m"}, "must be at most 5m"),
        ({"jwsk": "https://login.example.com"}, "did you mean 'jwks'"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_with_what_to_do(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(**settings)


def test_no_algorithm_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"jwt\.algorithms: is empty"):
        judged(sign(PRIMARY), algorithms=())


def test_scopes_or_claims_stand_for_the_audience():
    assert load(audience=None, scope="events.write")
    assert load(audience=None, claims__=None, **{"claims.client_id": "bridge"})


@pytest.mark.parametrize("missing", ["jwt", "cryptography"])
def test_without_the_package_it_is_said_how_to_get_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value) == (
        f"source.jwt: needs a package that is not installed ({missing}); "
        'pip install "oncebridge[jwt]"'
    )


def test_an_authority_that_cannot_be_read_is_told_at_the_start(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"jwt\.ca_file: .* cannot be used"),
        live(
            tmp_path,
            source__jwt__issuer=ISSUER,
            source__jwt__audience=AUDIENCE,
            source__jwt__jwks="https://localhost:1/keys",
            source__jwt__ca_file=str(tmp_path / "none.pem"),
        ),
    ):
        pass
