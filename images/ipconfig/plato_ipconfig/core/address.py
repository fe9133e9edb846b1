"""Whose address a request has: that of its connection, or, behind proxies that we trust, the one that they name.

X-Forwarded-For grows to the right, each proxy adds whom it saw. So it is read from the right, as long as the speaker is
trusted; what stands left of the first stranger is the stranger's own invention and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
MOST_HOPS: Final = 16
"""Entries of X-Forwarded-For that are looked at."""
HOUSE_BITS: Final = 64
"""An IPv6 customer has a /64 at least: that is one caller, as one IPv4 address is."""


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks as 10.0.0.0/8 or a single address. Raises ValueError."""
    return tuple(ip_network(text.strip()) for text in texts if text.strip())


def parsed(text: str) -> Address | None:
    """The address, an IPv4 one inside IPv6 taken out; None where it is none."""
    try:
        found = ip_address(text.strip().partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def caller(peer: str | None, forwarded: Sequence[str], trusted: Sequence[Network]) -> Address | None:
    """The caller's address. peer: of the connection; forwarded: the values of X-Forwarded-For, in their order."""
    known = parsed(peer) if peer else None
    if known is None or not _inside(known, trusted):
        return known
    for text in [entry for value in forwarded for entry in value.split(",")][: -MOST_HOPS - 1 : -1]:
        said = parsed(text)
        if said is None:
            return known
        known = said
        if not _inside(known, trusted):
            break
    return known


def limit_key(address: Address | None) -> str:
    """What counts as one caller when nobody said who it is."""
    if isinstance(address, IPv6Address):
        return str(ip_network((int(address) >> HOUSE_BITS << HOUSE_BITS, HOUSE_BITS)))
    return str(address)


def _inside(address: Address, nets: Sequence[Network]) -> bool:
    return any(address in net for net in nets)
