"""The address of a client, also behind proxies.

Whoever connects can write any header. So only the proxies that are configured are believed, and of the
addresses in the header only those that they have added themselves, which stand at its right end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from multidict import CIMultiDictProxy

from shared.networks import Address, Network, are_within, parse_address, parse_network


class ClientAddresses:
    def __init__(
        self, trusted_proxies: Sequence[str], header: Literal["X-Forwarded-For", "Forwarded"]
    ) -> None:
        """`trusted_proxies`: CIDRs. `header`: the one that they write."""
        self._trusted: tuple[Network, ...] = tuple(parse_network(cidr) for cidr in trusted_proxies)
        self._header = header

    def of(self, headers: CIMultiDictProxy[str], peer: str | None) -> Address | None:
        """`peer`: of the socket. None: a trusted proxy did not say it in a way that can be understood."""
        address = _parsed(peer or "")
        if address is None or not are_within(address, self._trusted):
            return address
        for hop in self._hops(headers):
            address = _parsed(hop)
            if address is None or not are_within(address, self._trusted):
                return address
        return address  # all are proxies of ours: the first of them asks for itself

    def _hops(self, headers: CIMultiDictProxy[str]) -> Iterator[str]:
        """Addresses as written, the last proxy's word first. Several headers are one (RFC 9110, 5.3)."""
        value = ",".join(headers.getall(self._header, ()))
        if not value.strip():
            return iter(())
        if self._header == "Forwarded":
            return (_node_of(element) for element in reversed(_split(value, ",")))
        return reversed(value.split(","))


def _parsed(hop: str) -> Address | None:
    """Of "192.0.2.1", "192.0.2.1:80", "2001:db8::1", "[2001:db8::1]" or "[2001:db8::1]:80"."""
    text = hop.strip()
    if text.startswith("["):
        text, closing, port = text[1:].partition("]")
        if not closing or (port and not port.startswith(":")):
            return None
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return parse_address(text.partition("%")[0])  # without the zone of a link-local address
    except ValueError:
        return None


def _node_of(element: str) -> str:
    """The value of `for` in an element of Forwarded (RFC 7239, section 4); "" without one."""
    for pair in _split(element, ";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value.strip().strip('"')
    return ""


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of quoted strings."""
    parts, begin, is_quoted, is_escaped = [], 0, False, False
    for position, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif is_quoted and character == "\\":
            is_escaped = True
        elif character == '"':
            is_quoted = not is_quoted
        elif character == separator and not is_quoted:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]
