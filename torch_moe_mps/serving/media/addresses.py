"""Check that an address is public, before the server fetches from it for a client."""

import ipaddress
from collections.abc import Iterator

# Not globally reachable, but global for `ipaddress` of some Python from 3.11 on: site-local addresses, NAT64
# of a network's own, documentation, segment routing.
_NOT_PUBLIC = tuple(
    map(ipaddress.IPv6Network, ("fec0::/10", "64:ff9b:1::/48", "3fff::/20", "5f00::/16", "100:0:0:1::/64"))
)
# Networks whose addresses end with one of IPv4: NAT64, IPv4-compatible, and IPv4-translated addresses.
_ENDS_WITH_IPV4 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))


def is_public(address: str) -> bool:
    """True if an address, and every IPv4 address embedded in it, is globally reachable."""
    place = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(place, ipaddress.IPv6Address):
        if place.ipv4_mapped is not None:
            return _is_global(place.ipv4_mapped)
        if any(place in network for network in _NOT_PUBLIC) or not all(map(_is_global, _inside(place))):
            return False
    return _is_global(place)


def _is_global(place: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return place.is_global and not place.is_multicast


def _inside(place: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    if place.sixtofour is not None:
        yield place.sixtofour
    if place.teredo is not None:
        yield from place.teredo
    if any(place in network for network in _ENDS_WITH_IPV4):
        yield ipaddress.IPv4Address(int(place) & 0xFFFFFFFF)
