"""IP addresses and networks as configuration, keys and headers write them."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated

from pydantic import AfterValidator

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def parse_address(text: str) -> Address:
    """An IPv4 address within IPv6 (::ffff:192.0.2.1) is the IPv4 address. Raises ValueError."""
    address = ip_address(text)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_network(text: str) -> Network:
    """A CIDR ("10.0.0.0/8"), or a single address. Raises ValueError, also for a CIDR with host bits."""
    return ip_network(text)


def are_within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _checked(text: str) -> str:
    parse_network(text)
    return text


Cidr = Annotated[str, AfterValidator(_checked)]  # of a configuration
