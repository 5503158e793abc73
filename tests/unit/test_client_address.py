"""Whose address counts, behind proxies and among headers that anybody can write."""

from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.auth.client_address import ClientAddresses

PROXIES = ["10.0.0.0/8", "2001:db8:ffff::/48"]


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def address(peer: str | None, *values: str, header: str = "X-Forwarded-For") -> str | None:
    found = ClientAddresses(PROXIES, header).of(headers(*((header, value) for value in values)), peer)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("peer", "values", "expected"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", ["203.0.113.5"], "192.0.2.7"),  # no proxy of ours: it may say what it likes
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [" "], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.5"], "203.0.113.5"),
        ("10.0.0.1", ["198.51.100.9, 203.0.113.5"], "203.0.113.5"),  # the left one is the client's own claim
        ("10.0.0.1", ["203.0.113.5, 10.0.0.2 ,10.0.0.3"], "203.0.113.5"),
        ("10.0.0.1", ["198.51.100.9", "203.0.113.5, 10.0.0.2"], "203.0.113.5"),  # several headers are one
        ("10.0.0.1", ["10.9.9.9, 10.0.0.2"], "10.9.9.9"),  # all ours: the first of them asks
        ("10.0.0.1", ["203.0.113.5:4711"], "203.0.113.5"),
        ("10.0.0.1", ["2001:db8::5"], "2001:db8::5"),
        ("10.0.0.1", ["[2001:db8::5]:4711"], "2001:db8::5"),
        ("10.0.0.1", ["fe80::1%eth0"], "fe80::1"),
        ("::ffff:10.0.0.1", ["::ffff:203.0.113.5"], "203.0.113.5"),  # IPv4 on a socket of both kinds
        ("2001:db8:ffff::1", ["203.0.113.5"], "203.0.113.5"),
        ("10.0.0.1", ["unknown"], None),
        ("10.0.0.1", ["203.0.113.5, unknown"], None),  # not what stands left of what a proxy did not know
        ("10.0.0.1", ["203.0.113.5,"], None),
        ("10.0.0.1", ["[2001:db8::5"], None),
        ("10.0.0.1", ["[2001:db8::5]x"], None),
        ("", [], None),  # a unix socket
        (None, ["203.0.113.5"], None),
    ],
)
def test_x_forwarded_for(peer: str | None, values: list[str], expected: str | None) -> None:
    assert address(peer, *values) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("for=203.0.113.5", "203.0.113.5"),
        ("For=198.51.100.9, FOR=203.0.113.5;proto=https;by=10.0.0.2", "203.0.113.5"),
        ('for="[2001:db8::5]:4711";host="a,b;c", for=10.0.0.2', "2001:db8::5"),
        ('for="203.0.113.5:80"', "203.0.113.5"),
        ('host="a\\"b, for=198.51.100.9", for=203.0.113.5', "203.0.113.5"),
        ("for=203.0.113.5, for=_hidden", None),
        ("for=203.0.113.5, proto=https", None),
        ('for="203.0.113.5', "203.0.113.5"),
        ('"', None),
    ],
)
def test_forwarded(value: str, expected: str | None) -> None:
    assert address("10.0.0.1", value, header="Forwarded") == expected


def test_only_the_configured_header_is_believed() -> None:
    both = headers(("Forwarded", "for=198.51.100.9"), ("X-Forwarded-For", "203.0.113.5"))
    assert ClientAddresses(PROXIES, "X-Forwarded-For").of(both, "10.0.0.1") == ip_address("203.0.113.5")
    assert ClientAddresses(PROXIES, "Forwarded").of(both, "10.0.0.1") == ip_address("198.51.100.9")
    assert ClientAddresses([], "X-Forwarded-For").of(both, "10.0.0.1") == ip_address("10.0.0.1")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_no_header_is_too_odd_to_be_answered(header: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    choose = random.Random(seed).choices
    addresses = ClientAddresses(PROXIES, header)
    pieces = [*'",;=[]:%\\ \t.0\x00\udcff', "for=", "10.0.0.1", "203.0.113.5", "::1", "1" * 50, "٣"]
    for _ in range(3000):
        value = "".join(choose(pieces, k=8))
        found = addresses.of(headers((header, value)), "10.0.0.1")
        assert found is None or isinstance(found, IPv4Address | IPv6Address), value
