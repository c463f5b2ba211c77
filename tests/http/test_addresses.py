import asyncio
import socket

import pytest
from tests.http.targets import on_both_loops

from oncebridge.http.addresses import (
    AddressRefused,
    Endpoint,
    is_loopback,
    is_public,
    names_loopback,
    resolve_allowed,
)

INWARD = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1"),
    *("172.31.255.255", "192.168.1.1", "100.64.0.1", "100.100.100.200", "169.254.169.254"),
    *("192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "fe80::1%lo"),
    *("fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "100::1", "2001:db8::1", "2001::1"),
    *("2001:2::1", "3fff::1", "5f00::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::808:808", "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::"),
]
OUTWARD = [
    *("8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1"),
    *("11.0.0.1", "223.255.255.255", "192.0.1.1", "2600::1", "2a00:1450:4001::1", "2001:200::1"),
    *("64:ff9b::808:808", "2002:808:808::1"),
]


@pytest.mark.parametrize("address", INWARD)
def test_an_address_that_leads_inwards_is_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", OUTWARD)
def test_an_address_of_the_internet_is_public(address):
    assert is_public(address)
    assert not is_loopback(address)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.53", "::1"])
def test_who_writes_this_host_means_it(host):
    assert names_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "2130706433", "0x7f000001", "0", "0.0.0.0", "0177.0.0.1", "::ffff:127.0.0.1"),
        *("localhost.", "localhost.example", "my.localhost", "localhost.localdomain", "::", ""),
    ],
)
def test_no_other_way_of_writing_it_counts(host):
    assert not names_loopback(host)


# All of these resolve on an ordinary host, and lead inwards.
@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::ffff:127.0.0.1", "0"),
        *("169.254.169.254", "fd00:ec2::254", "10.0.0.1", "192.168.0.1", "::", "fe80::1"),
        *("224.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
@on_both_loops
async def test_a_target_that_leads_inwards_is_refused_by_name_of_the_option(host):
    with pytest.raises(AddressRefused, match="allow_private = true"):
        await resolve_allowed(host, 443, allow_private=False)
    assert await resolve_allowed(host, 443, allow_private=True)


@on_both_loops
async def test_a_literal_address_is_given_as_it_is():
    found = await resolve_allowed("8.8.8.8", 443, allow_private=False)
    assert found == [Endpoint(socket.AF_INET, ("8.8.8.8", 443))]
    (only,) = await resolve_allowed("127.0.0.1", 8080, allow_private=False)
    assert only.address == ("127.0.0.1", 8080)
    (only,) = await resolve_allowed("::1", 8080, allow_private=False)
    assert (only.family, only.address[:2]) == (socket.AF_INET6, ("::1", 8080))


@on_both_loops
async def test_localhost_is_this_host_and_nothing_else():
    found = await resolve_allowed("localhost", 80, allow_private=False)
    assert {endpoint.address[0] for endpoint in found} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("host", ["a..example", "x" * 64 + ".example"])
@on_both_loops
async def test_what_cannot_be_a_name_is_a_name_not_found(host):
    with pytest.raises(socket.gaierror):
        await resolve_allowed(host, 80, allow_private=False)


def resolving(monkeypatch, *addresses):
    """Let every name have *addresses*; the list that comes back fills with the names asked for."""
    asked = []

    async def getaddrinfo(host, port, **_):
        asked.append(host)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_of_several_addresses_only_the_public_ones_are_used_in_their_order(monkeypatch):
    asked = resolving(monkeypatch, "10.0.0.5", "2600::5", "127.0.0.1", "8.8.4.4", "fe80::1")
    found = await resolve_allowed("hooks.example", 443, allow_private=False)
    assert [endpoint.address[0] for endpoint in found] == ["2600::5", "8.8.4.4"]
    found = await resolve_allowed("hooks.example", 443, allow_private=True)
    assert len(found) == 5
    assert asked == ["hooks.example"] * 2


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.5", "169.254.169.254"])
@pytest.mark.parametrize("host", ["hooks.example", "localhost.", "evil.localhost"])
async def test_a_name_that_leads_inwards_is_refused(monkeypatch, host, address):
    resolving(monkeypatch, address)
    with pytest.raises(AddressRefused):
        await resolve_allowed(host, 443, allow_private=False)


async def test_a_localhost_that_leads_elsewhere_is_refused(monkeypatch):
    resolving(monkeypatch, "8.8.8.8", "10.0.0.5")
    with pytest.raises(AddressRefused):
        await resolve_allowed("localhost", 443, allow_private=False)
