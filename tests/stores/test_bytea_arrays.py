"""Arrays of bytes, encoded by us in the format of the server."""

from datetime import timedelta

from tests.servers.postgres import Postgres

from oncebridge.stores.postgres.address import read_address
from oncebridge.stores.postgres.arrays import encode_bytes
from oncebridge.stores.postgres.pool import Pool

ARRAYS: list[list[bytes | None]] = [
    [],
    [b""],
    [b"", b""],
    [b"\x00\xff"],
    [b"a", b"b"],
    [b"a", b"bb", b""],
    [None],
    [None, None],
    [b"a", None],
    [b"aa", None, b"b", b""],
    [b"x" * 70_000, b"y"],
    [b"%03d" % n for n in range(500)],
    [b"%d" % n for n in range(500)],
]


async def test_the_server_understands_it_as_it_was_meant(postgres: Postgres) -> None:
    address, _ = read_address(postgres.url, ())
    seconds = timedelta(seconds=30)
    pool = Pool(address, size=1, timeout=seconds, connect_timeout=seconds)
    try:
        for values in ARRAYS:
            # The elements one by one are decoded by the driver; the whole is not decoded at all.
            rows = await pool.fetch(
                "SELECT u.value, $1 AS whole, cardinality($1) AS count "
                "FROM unnest($1::bytea[]) WITH ORDINALITY AS u(value, at) ORDER BY u.at",
                values,
            )
            assert [row["value"] for row in rows] == values
            assert all(row["whole"] == encode_bytes(values) for row in rows)
            assert all(row["count"] == len(values) for row in rows)
            ((told,),) = await pool.fetch("SELECT $1::bytea[]", values)
            assert told == encode_bytes(values)
    finally:
        await pool.aclose()
