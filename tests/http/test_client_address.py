"""Which address a request came from, and how often a wrong credential did."""

import pytest

from oncebridge.http.client_address import FailedAttempts, TooManyAttempts, TrustedProxies
from oncebridge.http.server import Request

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("peer", "said", "client"),
    [
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # no proxy of ours: not believed
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9, 198.51.100.7 ,10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.7", "10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["198.51.100.7:4711"], "198.51.100.7"),
        ("10.0.0.1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("10.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("10.0.0.1", ["2001:db8::7%eth0"], "2001:db8::7"),
        ("10.0.0.1", ["203.0.113.9, ::ffff:198.51.100.7, ::ffff:10.0.0.2"], "198.51.100.7"),
        ("::ffff:10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.07"], "10.0.0.1"),
        ("127.0.0.1", ["198.51.100.7"], "127.0.0.1"),  # loopback is a peer like any other
        ("::1", ["198.51.100.7"], "::1"),
        ("10.0.0.1", ["198.51.100.7, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7, "], "10.0.0.1"),
        ("10.0.0.1", ["\xff"], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7" + ", 10.0.0.2" * 3000], "10.0.0.2"),  # a bounded walk
    ],
)
def test_the_right_most_address_that_is_not_a_proxy_of_ours_counts(peer, said, client):
    headers = tuple((b"x-forwarded-for", one.encode("latin-1")) for one in said)
    request = Request("GET", "/", "", headers, peer=peer)
    assert TrustedProxies(["10.0.0.0/8"]).client(request) == client
    assert TrustedProxies([]).client(request) == peer


def tries(wrong, address, count):
    """Send *count* wrong credentials; return how many of them were one too many."""
    refused = 0
    for _ in range(count):
        try:
            wrong.note(address)
        except TooManyAttempts:
            refused += 1
    return refused


def test_an_address_has_ten_tries_a_minute():
    now = [NOW_MS]
    wrong = FailedAttempts(lambda: now[0])
    assert tries(wrong, "198.51.100.7", 15) == 5
    assert tries(wrong, "198.51.100.8", 10) == 0
    now[0] += 59_999
    assert tries(wrong, "198.51.100.7", 1) == 1
    now[0] += 1
    assert tries(wrong, "198.51.100.7", 11) == 1
    now[0] -= 86_400_000  # a clock that was set back shuts nobody out for a day
    assert tries(wrong, "198.51.100.7", 11) == 1


def test_of_ipv6_a_network_counts_and_loopback_is_one():
    wrong = FailedAttempts(lambda: NOW_MS)
    for number in range(1, 11):
        wrong.note(f"2001:db8:1:2::{number}")
        wrong.note(f"127.0.0.{number}")
    for address in ("2001:db8:1:2:ffff::1", "2001:db8:1:2::1%eth0", "::1", "::ffff:127.9.9.9"):
        with pytest.raises(TooManyAttempts):
            wrong.note(address)
    wrong.note("2001:db8:1:3::1")
    wrong.note("::ffff:198.51.100.7")
    assert tries(wrong, "198.51.100.7", 10) == 1


def test_many_addresses_together_have_a_thousand_tries_and_little_room():
    now = [NOW_MS]
    wrong = FailedAttempts(lambda: now[0])
    assert sum(tries(wrong, f"10.1.{n // 250}.{n % 250}", 1) for n in range(5000)) == 4000
    assert len(wrong._by_address) <= 1024
    now[0] += 60_000
    assert tries(wrong, "198.51.100.7", 1) == 0


def test_one_address_does_not_use_up_the_tries_of_all():
    wrong = FailedAttempts(lambda: NOW_MS)
    assert tries(wrong, "198.51.100.7", 5000) == 4990
    assert tries(wrong, "198.51.100.8", 1) == 0
