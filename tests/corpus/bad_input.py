"""
The bad-input corpus: what has been seen on wires and in files, each with a name.

A case says what becomes of it by HTTP and in a file: one verdict per record, `refused` where
HTTP answers 413, or `damaged` where a file cannot be read to its end. The two differ where a
body and a file are taken apart differently: an array without an end is one unreadable body,
but a file is read as far as it goes.
"""

import base64
import codecs
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

TRANSPORTS = Path(__file__).parents[1] / "events" / "transports"
DELIVERED, DEAD = "delivered", "dead"
REFUSED, DAMAGED = ["refused"], ["damaged"]


@dataclass(frozen=True)
class Case:
    name: str
    body: bytes
    http: list[str]
    file: list[str]
    headers: dict[str, str]
    reason: str | None = None


CASES: dict[str, Case] = {}


def case(name, body, *http, file=None, reason=None, **headers):
    assert name not in CASES, name
    named = {header.replace("_", "-"): value for header, value in headers.items()}
    outcome = list(http)
    CASES[name] = Case(name, body, outcome, outcome if file is None else file, named, reason)


def event(detail, **more):
    """Lay an event out; *detail* is text, so that it may be anything."""
    fields = {"source": '"com.example.mill"', "detail-type": '"Sack Filled"'}
    fields |= {name.replace("_", "-"): text for name, text in more.items()}
    inside = ", ".join(f'"{name}": {text}' for name, text in fields.items())
    return f'{{{inside}, "detail": {detail}}}'.encode()


def sack(number):
    return event(f'{{"sack": {number}}}')


# --- not an event at all --------------------------------------------------------------------

case("empty", b"", DEAD, file=[], reason="not-json")
case("blanks", b" \t\r\n ", DEAD, file=[], reason="not-json")
case("not JSON", b"hello, mill", DEAD, reason="not-json")
case("an opening brace", b"{", DEAD, reason="not-json")
case("a closing brace", b"}", DEAD, reason="not-json")
case("an opening bracket", b"[", DEAD, file=[])
case("a number", b"7", DEAD, reason="not-an-object")
case("a text", b'"sack"', DEAD, reason="not-an-object")
case("true", b"true", DEAD, reason="not-an-object")
case("null", b"null", DEAD, reason="not-an-object")
case("an empty object", b"{}", DEAD, reason="no-detail")
case("an empty array", b"[]")
case("NUL bytes", b"\0" * 100, DEAD, reason="not-json")
case("a NUL byte behind an event", sack(1) + b"\0", DEAD, file=[DELIVERED, DEAD],
     reason="not-json")  # fmt: skip
case("every byte there is", bytes(set(range(256)) - {10, 13}), DEAD, reason="not-json")
case("XML", b"<event><detail>1</detail></event>", DEAD, reason="not-json")
case("a form", b"payload=%7B%22detail%22%3A%7B%7D%7D", DEAD, reason="not-json")
case("a multipart body", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n{}\r\n--x--', DEAD,
     file=[DEAD] * 4)  # fmt: skip
case("base64 rubbish", base64.b64encode(b"\xde\xad\xbe\xef" * 300), DEAD, reason="not-json")
case("an event in base64", base64.b64encode(sack(2)), DEAD, reason="not-json")

# --- bytes that are not text ----------------------------------------------------------------

case("a byte order mark", codecs.BOM_UTF8 + sack(3), DEAD, file=[DELIVERED], reason="not-json")
case("a byte order mark alone", codecs.BOM_UTF8, DEAD, file=[], reason="not-json")
case("UTF-16", sack(4).decode().encode("utf-16"), DEAD, reason="not-json")
case("UTF-16 without a mark", sack(4).decode().encode("utf-16-le"), DEAD, file=[DEAD, DEAD],
     reason="not-json")  # fmt: skip
case("bad UTF-8 in a string", event('{"a": "\\xff"}').replace(b"\\xff", b"\xff"), DEAD,
     reason="not-json")  # fmt: skip
case("bad UTF-8 in a name", event('{"?": 1}').replace(b"?", b"\xfe"), DEAD, reason="not-json")
case("UTF-8 that is cut short", event('{"a": "?"}').replace(b"?", b"\xe2\x82"), DEAD,
     reason="not-json")  # fmt: skip
case("UTF-8 that is overlong", event('{"a": "?"}').replace(b"?", b"\xc0\x80"), DEAD,
     reason="not-json")  # fmt: skip
case("Latin-1", event('{"a": "?"}').replace(b"?", b"M\xfchle"), DEAD, reason="not-json")
case("a lone surrogate, escaped", event(r'{"a": "\ud800"}'), DEAD, reason="lone-surrogate")
case("a lone low surrogate, escaped", event(r'{"a": "\udc00x"}'), DEAD, reason="lone-surrogate")
case("surrogates in the wrong order", event(r'{"a": "\udc00\ud800"}'), DEAD,
     reason="lone-surrogate")  # fmt: skip
case("a lone surrogate in a name", event(r'{"\udfff": 1}'), DEAD, reason="lone-surrogate")
case("a lone surrogate in UTF-8", event('{"a": "?"}').replace(b"?", b"\xed\xa0\x80"), DEAD,
     reason="lone-surrogate")  # fmt: skip
case("a pair of surrogates", event(r'{"a": "\ud83c\udf3e"}'), DELIVERED)
case("a control character in a string", event('{"a": "\x01"}'), DEAD, reason="not-json")
case("a raw NUL in a string", event('{"a": "\x00"}'), DEAD, reason="not-json")
case("an escaped NUL in a string", event(r'{"a": "\u0000"}'), DELIVERED)
case("an escape that is none", event(r'{"a": "\x41"}'), DEAD, reason="not-json")
case("a record separator first", b"\x1e" + sack(5), DEAD, reason="not-json")

# --- numbers --------------------------------------------------------------------------------

case("NaN", event('{"a": NaN}'), DEAD, reason="not-finite")
case("Infinity", event('{"a": Infinity}'), DEAD, reason="not-finite")
case("-Infinity", event('{"a": [-Infinity]}'), DEAD, reason="not-finite")
case("1e400", event('{"a": 1e400}'), DEAD, reason="not-finite")
case("-1e400", event('{"a": {"b": -1E+400}}'), DEAD, reason="not-finite")
case("1e-400", event('{"a": 1e-400, "b": 1}'), DELIVERED)
case("a number of 30 digits", event('{"a": 123456789012345678901234567890}'), DELIVERED)
case("another number of 30 digits", event('{"a": 123456789012345678901234567891}'), DELIVERED)
case("a number of 5,000 digits", event(f'{{"a": {"9" * 5000}}}'), DEAD, reason="number-too-long")
case("a fraction of 5,000 digits", event(f'{{"a": 0.{"1" * 5000}}}'), DELIVERED)
case("minus zero", event('{"a": -0, "b": "minus zero"}'), DELIVERED)
case("a number with a zero first", event('{"a": 007}'), DEAD, reason="not-json")
case("a number with a plus", event('{"a": +1}'), DEAD, reason="not-json")
case("a number without a whole part", event('{"a": .5}'), DEAD, reason="not-json")
case("a number in hex", event('{"a": 0x10}'), DEAD, reason="not-json")

# --- almost JSON ----------------------------------------------------------------------------

case("a comma at the end", event('{"a": 1,}'), DEAD, reason="not-json")
case("single quotes", b"{'detail': {'a': 1}}", DEAD, reason="not-json")
case("a comment", event('{"a": 1} /* flour */'), DEAD, reason="not-json")
case("names without quotes", b"{detail: {a: 1}}", DEAD, reason="not-json")
case("an event that is cut short", sack(6)[:-3], DEAD, reason="not-json")
case("rubbish behind an event", sack(7) + b" and more", DEAD, file=[DELIVERED, DEAD])
case("two events without anything between", sack(8) + sack(9), DEAD, file=[DELIVERED] * 2)
case("the same name twice", event('{"a": 1, "a": 2}'), DEAD, reason="duplicate-name")
case("the same name twice, once escaped", event(r'{"a": 1, "\u0061": 1}'), DEAD,
     reason="duplicate-name")  # fmt: skip
case("the same name twice, deep inside", event('{"a": [{"b": {"c": 1, "c": 1}}]}'), DEAD,
     reason="duplicate-name")  # fmt: skip
case("two details", b'{"detail": {"a": 1}, "detail": {"a": 2}}', DEAD, reason="duplicate-name")
case("two ids", event('{"a": 1}', id='"x", "id": "y"'), DEAD, reason="duplicate-name")

# --- depth and size -------------------------------------------------------------------------


def deep(levels):
    return event('{"a":' * (levels - 1) + "1" + "}" * (levels - 1))


case("as deep as may be", deep(100), DELIVERED)
case("a level too deep", deep(101), DEAD, reason="too-deep")
case("a depth of 1,000", deep(1000), DEAD, reason="too-deep")
case("a depth of 100,000", deep(100_000), DEAD, reason="too-deep")
case("arrays to a depth of 100,000", event(f'{{"a": {"[" * 100_000}{"]" * 100_000}}}'), DEAD,
     reason="too-deep")  # fmt: skip
case("a hundred thousand brackets", b"[" * 100_000, DEAD)
case("a hundred thousand braces", b"{" * 100_000, DEAD, reason="too-many-values")
case("a hundred thousand openings", b'{"a":' * 100_000, DEAD)
case("a string of 1 MB", event(f'{{"a": "{"flour " * 170_000}"}}'), DELIVERED)
case("a hundred thousand members",
     event("{" + ",".join(f'"m{n}": {n}' for n in range(100_000)) + "}"), DELIVERED)  # fmt: skip
case("more than the limit", event(f'{{"a": "{"x" * 2**21}"}}'), *REFUSED, file=[DEAD],
     reason="too-large")  # fmt: skip
case("a line of 20 MB", b'{"detail": {"a": "' + b"x" * 20_000_000, *REFUSED, file=[DEAD],
     reason="too-large")  # fmt: skip

# --- an envelope that is odd ----------------------------------------------------------------

case("no id", event('{"a": "no id"}'), DELIVERED)
case("no source and no type", b'{"detail": {"a": "nothing else"}}', DELIVERED)
case("no detail", b'{"id": "a", "source": "com.example.mill", "detail-type": "x"}', DEAD,
     reason="no-detail")  # fmt: skip
case("a detail that is null", event("null"), DEAD, reason="no-detail")
case("a detail that is a list", event("[1]"), DEAD, reason="no-detail")
case("a detail that is a number", event("7"), DEAD, reason="no-detail")
case("a detail that is text", event('"flour"'), DEAD, reason="no-detail")
case("a detail that is empty", event("{}"), DEAD)
case("a detail that is JSON in a string", event(json.dumps('{"a": "in a string"}')), DELIVERED)
case("a detail that is bad JSON in a string", event(json.dumps('{"a": ')), DEAD,
     reason="no-detail")  # fmt: skip
case("a detail that is NaN in a string", event(json.dumps('{"a": NaN}')), DEAD,
     reason="not-finite")  # fmt: skip
case("an id that is null", event('{"a": "id null"}', id="null"), DELIVERED)
case("an id that is a list", event('{"a": "id list"}', id='["a"]'), DELIVERED)
case("an id that is a number", event('{"a": "id number"}', id="7"), DELIVERED)
case("an id that is empty", event('{"a": "id empty"}', id='""'), DELIVERED)
case("an id of 10 kB", event('{"a": "id long"}', id=f'"{"i" * 10_000}"'), DELIVERED)
case("an id with a line end", event('{"a": "id lines"}', id=r'"a\r\nX-Injected: yes"'), DELIVERED)
case("an id with a NUL", event('{"a": "id nul"}', id=r'"a\u0000b"'), DELIVERED)
case("an id of another alphabet", event('{"a": "id sheaf"}', id='"🌾"'), DELIVERED)
case("an id that would drop a table",
     event('{"a": "id sql"}', id="\"'; DROP TABLE claims; --\""), DELIVERED)  # fmt: skip
case("an id with braces", event('{"a": "id braces"}', id='"{x}{}%s%d"'), DELIVERED)
case("a source that is null", event('{"a": "source null"}', source="null"), DELIVERED)
case("a source that is a list", event('{"a": "source list"}', source="[1]"), DELIVERED)
case("a type with markup",
     event('{"a": "type markup"}', detail_type='"<script>alert(1)</script>"'), DELIVERED)  # fmt: skip
case("a time that is none", event('{"a": "time"}', time='"yesterday"'), DELIVERED)
case("resources that are none", event('{"a": "resources"}', resources='{"x": [null]}'), DELIVERED)
case("fields of another's", event('{"a": "fields"}', flour='{"b": [1, {"c": null}]}'), DELIVERED)
case("names that mean something elsewhere",
     event('{"__proto__": 1, "constructor": 2, "": 3, "detail": {"id": 4}}'), DELIVERED)  # fmt: skip

# --- wrapped: not unwrapped yet, so dead, and each for itself -------------------------------

for path in sorted(TRANSPORTS.glob("*.json")):
    body = path.read_bytes()
    if path.stem == "eventsv2_custom_bus_lambda_batch_raw":
        case(path.stem, body, *[DELIVERED] * len(json.loads(body)))
    elif isinstance(json.loads(body), list):
        case(path.stem, body, *[DEAD] * len(json.loads(body)), reason="no-detail")
    else:
        case(path.stem, body, DEAD, reason="no-detail")

INNER = sack(10).decode()
SNS = json.dumps({"Type": "Notification", "MessageId": "m", "Message": INNER})
SQS = json.dumps({"Records": [{"messageId": "m", "body": SNS}]}).encode()
case("an event in SNS", SNS.encode(), DEAD, reason="no-detail")
case("an event in SNS in SQS", SQS, DEAD, reason="no-detail")
case("another event in SNS in SQS", SQS.replace(b"10", b"11"), DEAD, reason="no-detail")

# --- several in one -------------------------------------------------------------------------

case("an array of arrays", b"[[" + sack(12) + b"],[" + sack(13) + b"]]", DEAD, DEAD,
     reason="not-an-object")  # fmt: skip
case("an array of everything", b'[1, "a", null, {}, ' + sack(14) + b", []]",
     DEAD, DEAD, DEAD, DEAD, DELIVERED, DEAD)  # fmt: skip
case("an array without its end", b"[" + sack(15) + b", " + sack(16)[:-5], DEAD,
     file=[DELIVERED, DEAD], reason="not-json")  # fmt: skip
case("an array with a comma at the end", b"[" + sack(17) + b",]", DEAD, file=[DELIVERED])
case("an array with something behind it", b"[" + sack(18) + b"] flour", DEAD,
     file=[DELIVERED, DEAD])  # fmt: skip
case("an array with one bad element", b"[" + sack(19) + b", NaN, " + sack(20) + b"]", DEAD,
     file=[DELIVERED, DEAD, DELIVERED])  # fmt: skip
case("lines with a bad one in the middle", b"\n".join([sack(21), b'{"detail":', sack(22)]),
     DELIVERED, DEAD, DELIVERED, Content_Type="application/x-ndjson")  # fmt: skip
case("lines with a bad one, unannounced", b"\n".join([sack(23), b"flour", sack(24)]), DEAD,
     file=[DELIVERED, DEAD, DELIVERED])  # fmt: skip
case("lines with carriage returns alone", sack(25) + b"\r" + sack(26), DEAD,
     file=[DELIVERED, DELIVERED], reason="not-json")  # fmt: skip
case("lines with blank ones between", b"\n\n \r\n" + sack(27) + b"\n\t\n\n" + sack(28) + b"\r\n",
     DELIVERED, DELIVERED, Content_Type="application/x-ndjson")  # fmt: skip
case("a line that is very long among others",
     b"\n".join([sack(29), event(f'{{"a": "{"y" * 1_000_000}"}}'), sack(30)]),
     DELIVERED, DELIVERED, DELIVERED, Content_Type="application/x-ndjson")  # fmt: skip

# --- gzip -----------------------------------------------------------------------------------

BOMB = gzip.compress(b" " * 100_000_000, mtime=0)
assert len(BOMB) < 100_000
PACKED = gzip.compress(sack(31), mtime=0)
case("a gzip bomb", BOMB, *REFUSED, file=[DEAD], Content_Encoding="gzip")
case("a gzip bomb that is one long string",
     gzip.compress(b'{"detail": {"a": "' + b"x" * 100_000_000, mtime=0), *REFUSED, file=[DEAD],
     Content_Encoding="gzip")  # fmt: skip
case("gzip that is cut short", PACKED[:-30], DEAD, file=[DEAD, *DAMAGED], Content_Encoding="gzip")
case("gzip that is cut short in its head", PACKED[:5], DEAD, file=DAMAGED, Content_Encoding="gzip")
case("gzip with a wrong sum", PACKED[:-8] + bytes(8), DEAD, file=[DELIVERED, *DAMAGED],
     Content_Encoding="gzip")  # fmt: skip
case("gzip with something behind it", PACKED + b"flour", DEAD, file=[DELIVERED, *DAMAGED],
     Content_Encoding="gzip")  # fmt: skip
case("gzip that is none", b"\x1f\x8brubbish", DEAD, file=DAMAGED, Content_Encoding="gzip")
case("plain text that says gzip", b"flour", DEAD, Content_Encoding="gzip")
case("gzip in gzip", gzip.compress(gzip.compress(sack(32), mtime=0)), DEAD, Content_Encoding="gzip")
case("gzip unannounced", gzip.compress(sack(33), mtime=0), DEAD, file=[DELIVERED])
