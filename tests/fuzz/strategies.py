"""What the parsers are fed: JSON in any spelling, and bytes that nearly are what they should be."""

import json

from hypothesis import strategies as st

characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=12)
names = st.sampled_from(["a", "b", "id", "detail", "order", "é", "", "a.b"]) | texts
integers = st.integers(-(10**40), 10**40) | st.integers(-5, 5)
floats = st.floats(allow_nan=False, allow_infinity=False)


def _as_text(double, digits):
    """Write a double with a number of digits: enough to name it, or so many that they are its own."""
    return f"{double:.{digits}e}"


_long_mantissas = st.builds(
    "{}{}.{}".format,
    st.sampled_from(["", "-"]),
    st.sampled_from(["0", "1", "9007199254740993", "123456789012345678901234"]) | st.just("7"),
    st.text("0123456789", min_size=1, max_size=30) | st.sampled_from(["0", "000000000000000001"]),
)
decimals = (
    st.builds(_as_text, floats, st.integers(0, 40))
    | st.builds(repr, floats).filter(lambda text: "." in text or "e" in text)
    | _long_mantissas
    | st.builds(
        "{}{}{}".format,
        _long_mantissas,
        st.sampled_from(["e", "E"]),
        st.integers(-400, 400) | st.integers(-(10**20), 10**20),
    )
    | st.sampled_from(["1e-400", "2E-400", "-0.0", "0e-400", "5e-324", "3e-324", "1e-999999999"])
)
"""Numbers as they are written, many of which a double would round."""
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
details = st.dictionaries(names, values, min_size=1, max_size=5)
envelopes = st.fixed_dictionaries(
    {"detail": details},
    optional={
        "version": st.just("0"),
        "id": texts,
        "detail-type": texts,
        "source": texts,
        "account": texts,
        "time": st.just("2026-03-01T10:00:00Z"),
        "region": texts,
        "resources": st.lists(texts, max_size=2),
        "replay-name": texts,
        "other": values,
    },
)


def plain(value):
    """Spell a value as EventBridge would."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@st.composite
def spelt(draw, value):
    """Spell a value in some other way: other order, other blanks, other escapes."""
    return _spell(draw, value).encode()


def _spell(draw, value):
    gap = draw(st.sampled_from(["", "", " ", "\n", "\t ", "\r\n"]))
    match value:
        case dict():
            members = draw(st.permutations(list(value.items())))
            inside = ",".join(
                f"{gap}{_spell_text(draw, name)}:{_spell(draw, item)}" for name, item in members
            )
            return f"{{{inside}{gap}}}"
        case list():
            return f"[{','.join(gap + _spell(draw, item) for item in value)}{gap}]"
        case str():
            return gap + _spell_text(draw, value)
        case _:
            return gap + json.dumps(value)


def _spell_text(draw, text):
    way = draw(st.integers(0, 2))
    if way == 0:
        return json.dumps(text, ensure_ascii=False)
    if way == 1:
        return json.dumps(text)
    units = text.encode("utf-16-be")
    escapes = [f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2)]
    return f'"{"".join(escapes)}"'


PIECES = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"\\u0000", b"null"),
    *(b"1.000000000000000001", b"1e-400", b"9007199254740993.0", b"0.10000000000000000555", b"e-9"),
    *(b"NaN", b"-Infinity", b"1e400", b"-0", b"0.10", b"9" * 30, b"9" * 4301, b"\xff", b"\xed\xa0"),
    *(b"\xef\xbb\xbf", b"\0", b"\n", b"\r", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\x1f\x8b"),
    *(b'"detail":', b'{"a":1}', b'"a":1', b"[" * 200, b'{"a":' * 150, b"true", b'"id":null'),
]


@st.composite
def mutated(draw, originals, pieces=PIECES):
    """Take some bytes, and spoil them a little."""
    data = draw(originals)
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(0, len(data)))
        last = min(len(data), first + draw(st.sampled_from([0, 0, 1, 2, 5, 50])))
        piece = draw(st.sampled_from(pieces) | st.binary(max_size=6) | st.just(data[first:last]))
        data = data[:first] + piece + data[last:]
    return data
