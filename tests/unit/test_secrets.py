"""What is secret stays so, however it is asked for, printed or got wrong."""

import copy
import json
import pickle
import re
import string
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncebridge.base.secrets import (
    Address,
    Secret,
    has_credentials,
    is_at_aws,
    mask_address,
    resolve,
    resolve_address,
)
from oncebridge.errors import ConfigError

CANARY = "c4n4ry-5hh"


# --- a secret ---------------------------------------------------------------------------


class Holder(msgspec.Struct, frozen=True):
    secret: Secret


@pytest.mark.parametrize(
    "shown",
    [
        str,
        repr,
        ascii,
        "{}".format,
        "{!r}".format,
        lambda secret: f"{secret}",
        lambda secret: "%s %r" % (secret, secret),  # noqa: UP031 - this is what is tried
        lambda secret: str([secret]) + str({"a": secret}) + str((secret,)),
        lambda secret: repr(Holder(secret)),
        lambda secret: json.dumps({"secret": secret}, default=str),
        lambda secret: str(vars(secret) if hasattr(secret, "__dict__") else ""),
        lambda secret: str(ValueError(secret)) + repr(ValueError(secret)),
    ],
)
def test_no_way_of_printing_shows_a_secret(shown):
    assert CANARY not in shown(Secret(CANARY))


def test_no_encoder_takes_a_secret_for_something_to_write():
    with pytest.raises(TypeError):
        json.dumps(Secret(CANARY))
    with pytest.raises(TypeError):
        msgspec.json.encode(Secret(CANARY))


def test_whoever_has_to_send_it_can():
    assert Secret(CANARY).reveal() == CANARY
    assert copy.copy(Secret(CANARY)) == Secret(CANARY)
    assert Secret(CANARY) != Secret("another")
    assert Secret(CANARY) != CANARY
    assert len({Secret(CANARY), Secret(CANARY)}) == 1


def test_an_address_is_masked_where_it_is_quoted():
    address = Address(f"https://user:{CANARY}@crm.example.com/hook")
    assert repr(address) == "'https://***@crm.example.com/***93c24104'"
    assert CANARY not in f"{address!r}{[address]}{ {'url': address} }"
    assert address == f"https://user:{CANARY}@crm.example.com/hook"
    assert pickle.loads(pickle.dumps(address)) == address


# --- where it comes from ----------------------------------------------------------------


def test_a_text_stands_for_itself():
    for text in (
        CANARY,
        "environment",
        "enva:b",
        "",
        "https://x",
        "Env:HOME",
        " env:HOME",
        "SSM:x",
        "ssm",
    ):
        assert resolve(text, "here") == text


def test_the_environment_is_asked_by_name(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", CANARY)
    assert resolve("env:SOME_SECRET", "here") == CANARY
    monkeypatch.setenv("SOME_SECRET", " kept as it is \n")
    assert resolve("env:SOME_SECRET", "here") == " kept as it is \n"


@pytest.mark.parametrize("text", ["env:NO_SUCH_SECRET", "env:EMPTY_SECRET", "env:", "env:\0"])
def test_a_variable_that_is_missing_or_empty_is_named(monkeypatch, text):
    monkeypatch.setenv("EMPTY_SECRET", "")
    with pytest.raises(ConfigError) as caught:
        resolve(text, "source.bearer[0]")
    assert caught.value.where == "source.bearer[0]"
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CANARY.encode(), CANARY),
        (f"{CANARY}\n".encode(), CANARY),
        (f"{CANARY}\r\n".encode(), CANARY),
        (f"\ufeff{CANARY}\r\n".encode(), CANARY),
        (b" with blanks \n", " with blanks "),
        (b"two\nlines\n", "two\nlines"),
        ("schl\u00fcssel\n".encode(), "schl\u00fcssel"),
    ],
)
def test_a_file_is_read_without_the_end_of_its_line(tmp_path, content, expected):
    path = tmp_path / "secret"
    path.write_bytes(content)
    assert resolve(f"file:{path}", "here") == expected


def test_the_content_is_not_looked_up_again(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("env:OTHER")
    monkeypatch.setenv("OTHER", "file:/etc/hostname")
    assert resolve(f"file:{tmp_path / 'secret'}", "here") == "env:OTHER"
    assert resolve("env:OTHER", "here") == "file:/etc/hostname"


def bad_files(directory):
    (directory / "empty").write_bytes(b"")
    (directory / "blank").write_bytes(b"\n\r\n")
    (directory / "latin").write_bytes(CANARY.encode() + b"\xff\xfe")
    (directory / "huge").write_bytes(CANARY.encode() * 10_000)
    (directory / "folder").mkdir()
    (directory / "loop").symlink_to(directory / "loop")
    names = ["empty", "blank", "latin", "huge", "folder", "loop", "missing", "nul\0", "x" * 5000]
    return [f"file:{directory / name}" for name in names] + ["file:", "file:/dev/zero"]


def test_a_file_that_cannot_be_used_is_named_and_never_quoted(tmp_path):
    for text in bad_files(tmp_path):
        with pytest.raises(ConfigError) as caught:
            resolve(text, "sink.headers.Authorization")
        assert caught.value.where == "sink.headers.Authorization"
        assert repr(text) in caught.value.message
        assert CANARY not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_address_is_looked_up_everywhere_but_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_URL", f"https://u:{CANARY}@h/")
    assert resolve_address("env:SINK_URL", "sink") == f"https://u:{CANARY}@h/"
    (tmp_path / "out.ndjson").write_text(CANARY)
    for address in (f"file:{tmp_path / 'out.ndjson'}", "https://h/", "-", ""):
        assert resolve_address(address, "sink") == address
    with pytest.raises(
        ConfigError, match=r"sink: .*the environment variable NO_SUCH_URL is not set"
    ):
        resolve_address("env:NO_SUCH_URL", "sink")


@pytest.mark.parametrize("text", ["ssm", "SSM:x", "ssms:x", " ssm:x", "secretsmanager", "env:x"])
def test_little_is_taken_for_a_name_at_aws(text):
    assert not is_at_aws(text)
    assert is_at_aws("ssm:x")
    assert is_at_aws("secretsmanager:x#y")


# --- addresses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://crm.example.com", None),
        ("https://crm.example.com:8443/", None),
        ("https://crm.example.com/hook", "https://crm.example.com/***93c24104"),
        ("https://crm.example.com/hook?x=1#z", "https://crm.example.com/***ea40094d"),
        ("https://crm.example.com?x=1", "https://crm.example.com/***3d8dda98"),
        ("HTTP://crm.example.com:8443/hook", "HTTP://crm.example.com:8443/***93c24104"),
        ("https://user:pw@crm.example.com/hook", "https://***@crm.example.com/***93c24104"),
        ("https://sk_live_token@crm.example.com/", "https://***@crm.example.com/"),
        ("https://token:x-oauth-basic@git.example.com/", "https://***@git.example.com/"),
        ("https://user:@crm.example.com/", "https://***@crm.example.com/"),
        ("http://[::1]:8080/events", "http://[::1]:8080/***1b4c42f5"),
        ("signed+https://h/hooks/T0/pw", "signed+https://h/***6ee130eb"),
        ("https://h/x?token=pw", "https://h/***e95c8b5e"),
        ("https://h/x#access_token=pw", "https://h/***de5246be"),
        ("https://h/hooks/@pw", "https://***"),
        ("https://h/x?token=p@w", "https://***"),
        ("https://u:a?token=b@h/x", "https://***"),
        ("redis://:pw@127.0.0.1:6379/0", "redis://***@127.0.0.1:6379/0"),
        ("rediss://default:p%40ss@[fd00::7]:6379", "rediss://***@[fd00::7]:6379"),
        ("redis+sentinel://:pw@a:1,b:2/main/0", "redis+sentinel://***@a:1,b:2/main/0"),
        ("postgresql://me:p@ss/w:rd@db.example.com/x", "postgresql://***@db.example.com/x"),
        ("postgresql://db.example.com/x?table=events", None),
        (
            "postgresql://h/x?user=a&password=pw&table=t",
            "postgresql://h/x?user=a&password=***&table=t",
        ),
        ("x://h/x?a=1&Access-Token=pw&b=2", "x://h/x?a=1&Access-Token=***&b=2"),
        ("x://h/x?code=pw", "x://h/x?code=***"),
        ("x://h/x?sig=pw&sv=2026", "x://h/x?sig=***&sv=2026"),
        ("x://h/x?apikey=pw#top", "x://h/x?apikey=***"),
        ("sqs:https://sqs.eu-west-1.amazonaws.com/123456789012/orders", None),
        ("events:arn:aws:events:eu-west-1:123456789012:event-bus/crm", None),
        ("s3://seen/oncebridge", None),
        ("sqs:https://me:pw@sqs.example.com/q", "sqs:https://***@sqs.example.com/q"),
        ("sqlite:data/seen@home.db", None),
        ("file:/var/in@box/events.ndjson", None),
        ("file:///var/in@box/events.ndjson", None),
        ("python:shop.hooks:take", None),
        ("memory:", None),
        ("-", None),
        ("", None),
        ("user:pw@h", "***@h"),
        ("pw@h", "***@h"),
    ],
)
def test_what_is_shown_of_an_address(url, shown):
    assert mask_address(url) == (url if shown is None else shown)


def test_two_webhooks_on_one_host_are_told_apart_by_their_hash():
    hooks = [f"https://hooks.example.com/{path}" for path in ("T0/a", "T0/b", "T0/a?x=1")]
    shown = [mask_address(hook) for hook in hooks]
    assert len(set(shown)) == 3
    assert [mask_address(hook) for hook in hooks] == shown
    # The password is no part of the hash, from which a short one could be guessed.
    ones, others = (mask_address(f"https://u:{pw}@h/hook") for pw in ("1234", "4321"))
    assert ones == others


@pytest.mark.parametrize(
    ("url", "has"),
    [
        ("https://crm.example.com/hooks/T0/B1", False),
        ("https://u:pw@crm.example.com/", True),
        ("https://crm.example.com/?token=pw", True),
        ("file:/var/in@box/events.ndjson", False),
        ("redis://:pw@h/0", True),
    ],
)
def test_credentials_in_an_address_are_recognised(url, has):
    assert has_credentials(url) is has


SECRETS = st.text(
    st.sampled_from(string.ascii_letters + string.digits + "@:/?#%&=;+,!~._-[] \u00e9\u2100\n"),
    min_size=1,
    max_size=20,
).map(lambda text: f"Zq{text}qZ")
HOSTS = st.sampled_from(
    ["h", "db.example.com", "db.example.com:5432", "[::1]", "[fd00::7]:6379", "10.0.0.1:80", ""]
)
SCHEMES = st.sampled_from(["https", "http", "redis", "rediss", "postgresql", "redis+cluster", "x"])
RESTS = st.sampled_from(["", "/", "/0", "/a/b", "/a?table=x", "?table=x", "/a#b"])


def pieces(secret):
    """List what of a secret would be a leak: each part that stands between separators."""
    return [part for part in re.split(r"[^A-Za-z0-9]+", secret) if len(part) > 2]


@given(SCHEMES, st.sampled_from(["", "user", "Zuser%20x"]), SECRETS, HOSTS, RESTS)
@example("https", "user", "Zq@qZ", "h", "/a@b")
@example("redis", "", "Zq/1?token=qZ", "h", "")
def test_no_password_shows_whatever_it_is_made_of(scheme, user, secret, host, rest):
    shown = mask_address(f"{scheme}://{user}:{secret}@{host}{rest}")
    around = f"{scheme}{host}{rest}"
    for piece in pieces(secret):
        assume(piece not in around)
        assert piece not in shown
    assert shown.startswith(f"{scheme}://***")


@given(SCHEMES, SECRETS, HOSTS, RESTS)
def test_no_user_shows_since_tokens_stand_there(scheme, secret, host, rest):
    for url in (f"{scheme}://{secret}@{host}{rest}", f"{scheme}://{quote(secret)}@{host}{rest}"):
        shown = mask_address(url)
        for piece in [*pieces(secret), *pieces(quote(secret))]:
            assume(piece not in f"{scheme}{host}{rest}")
            assert piece not in shown


@given(
    SCHEMES,
    HOSTS,
    st.sampled_from(["token", "access_token", "key", "api-key", "X-Amz-Signature", "password"]),
    SECRETS.filter(lambda secret: "&" not in secret),
    st.sampled_from(["", "&a=b", "&table=x"]),
)
def test_no_token_in_the_query_shows(scheme, host, name, secret, rest):
    for value in (secret, quote(secret, safe="")):
        shown = mask_address(f"{scheme}://{host or 'h'}/a?b=c&{name}={value}{rest}")
        for piece in [*pieces(secret), *pieces(value)]:
            assume(piece not in f"{scheme}://{host}/a?b=c&{name}={rest}")
            assert piece not in shown


@given(SECRETS.filter(lambda secret: "://" not in secret), HOSTS)  # or it is a URL
def test_no_password_shows_in_what_is_no_url(secret, host):
    for text in (f"user:{secret}@{host}", f"{secret}@{host}", f":{secret}@{host}"):
        shown = mask_address(text)
        for piece in pieces(secret):
            assume(piece not in host)
            assert piece not in shown


@given(st.text(max_size=60))
def test_anything_can_be_masked_and_twice_is_the_same_as_once(text):
    shown = mask_address(text)
    assert mask_address(shown) == shown
    if "@" not in text and not re.search(r"[?&;#]|(?i:https?://)", text):
        assert shown == text


def test_a_long_text_is_masked_in_no_time():
    text = "https://" + "a:b@" * 20_000 + "?token=" * 20_000
    assert mask_address(text).startswith("https://***")
