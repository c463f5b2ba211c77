"""Write what each target begins with: `python fuzz/seeds.py FOLDER`."""

import sys
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.corpus.bad_input import CASES, sack  # noqa: E402 - found by the line above

LARGEST = 20_000


def events():
    yield from (case.body for case in CASES.values() if len(case.body) <= LARGEST)
    yield from (path.read_bytes() for path in (ROOT / "tests" / "events").rglob("*.json"))


def records():
    yield from (b"\x10" + body for body in events())


def requests():
    for body in (sack(1), b"[" + sack(1) + b"," + sack(2) + b"]", sack(1) + b"\n" + sack(2)):
        head = b"POST /e HTTP/1.1\r\nHost: localhost\r\nx-api-key: apple-key-of-a-mill\r\n"
        yield head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        yield head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    yield b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    yield b"HEAD /openapi.json HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    form = b"grant_type=client_credentials&client_id=a&client_secret=chalk-on-the-board"
    yield b"POST /oauth/token HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
        len(form),
        form,
    )
    yield (
        b"POST /e HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nX-Oncebridge-Timestamp: 1790000000"
        b"\r\nX-Oncebridge-Signature: v1=" + b"0" * 64 + b"\r\n\r\n{}"
    )


def configurations():
    yield b'STORE=memory:\nsink=-\n[[rules]]\nname = "a"\nkey = "id"\nwindow = "6d"\n'
    yield b"SINK__RATE=5/s\nsource.api_keys=apple-key-of-a-mill\nsource = 'http://127.0.0.1:1/e'\nstore = 'memory:'\n"
    yield (
        b"LIMITS__MAX_DEPTH=9\nmode=shadow\n[[routes]]\nname = 'a'\nsink = '-'\n"
        b"match = { detail = { a = [{ numeric = ['>', 1] }, { exists = false }] } }\n"
        b"[[rules]]\nname = 'b'\ntiers = [{ key = ['detail.a'] }, { key = 'content' }]\n"
    )


SEEDS = {"event": events, "records": records, "http": requests, "config": configurations}


def main(folder: Path) -> None:
    for target, seeds in SEEDS.items():
        place = folder / target
        place.mkdir(parents=True, exist_ok=True)
        for seed in seeds():
            (place / blake2b(seed, digest_size=8).hexdigest()).write_bytes(seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
