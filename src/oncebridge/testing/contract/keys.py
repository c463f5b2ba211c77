from oncebridge.stores.api import Busy, Commits, Duplicate, Fate, Reply
from oncebridge.testing.contract.harness import Harness, _fresh, claimed


class KeyCases(Harness):
    """Keys and memos of any bytes and length: no two keys are confused."""

    async def test_keys_of_any_shape_are_kept_apart(self) -> None:
        shapes = [
            b"",
            b" ",
            b"\r\nX-Injected: 1",
            b"\n",
            b"\x00",
            b"\x00\x00",
            b"a\x00b",
            b"a\x00c",
            "🎉🎉".encode(),
            "é".encode(),
            "e\u0301".encode(),
            b"\xff\xfe\x80",
            b"k" * 10_000,
            b"k" * 9_999 + b"l",
            b"'; drop table records; --",
            b'"',
            b"\\",
            b"%s%d{0}",
            b"{}",
            b"{a}b",
            b"{a}c",
            b"*",
            b"A",
            b"a",
            b"a ",
        ]
        start = self.key()
        keys = [start + shape for shape in shapes]
        answers = await self.ask_all([self.want(key, memo=b"%d" % n) for n, key in enumerate(keys)])
        assert [claimed(answer).held[0].key for answer in answers] == keys
        seen = await self.store.peek(keys)
        assert [record and (record.key, record.memo) for record in seen] == [
            (key, b"%d" % number) for number, key in enumerate(keys)
        ]
        done = await self.store.commit(
            Commits.of([self.done(claimed(answer)) for answer in answers[::2]])
        )
        assert set(done) == {Reply.COMMITTED}
        again = await self.ask_all([self.want(key) for key in keys])
        assert [type(answer) for answer in again[::2]] == [Duplicate] * len(keys[::2])
        assert [type(answer) for answer in again[1::2]] == [Busy] * len(keys[1::2])

    async def test_keys_that_share_a_long_prefix_are_kept_apart(self) -> None:
        start = _fresh() + _fresh()
        keys = [start + bytes([last]) for last in range(256)]
        assert {len(key) for key in keys} == {33}
        claims = [claimed(one) for one in await self.ask_all([self.want(key) for key in keys])]
        assert [claim.held[0].attempts for claim in claims] == [1] * 256
        await self.store.commit(Commits.of([self.done(claim) for claim in claims[:128]]))
        answers = await self.ask_all([self.want(key) for key in keys])
        assert [type(answer) for answer in answers] == [Duplicate] * 128 + [Busy] * 128
        assert [answer.key for answer in answers if isinstance(answer, Duplicate | Busy)] == keys

    async def test_memos_of_any_bytes_come_back(self) -> None:
        for memo in (bytes(range(256)), b"\x00", b"null", b"x" * 4000):
            claim = await self.lapsed(self.key(), memo=memo)
            key = claim.held[0].key
            assert claim.held[0].memo == memo
            again = await self.hold(self.want(key))
            assert again.held[0].memo == memo
            assert await self.commit(self.done(again)) is Reply.COMMITTED
            assert await self.ask(self.want(key)) == Duplicate(key, Fate.DELIVERED, memo)
            assert (await self.see(key)).memo == memo
