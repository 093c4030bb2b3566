"""Which addresses images may be fetched from: only public ones, not the server's own network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult

# All addresses that are assigned to hosts (RFC 4291); others also stand for IPv4 addresses of this
# machine (::127.0.0.1), or were private once (fec0::/10).
_UNICAST = IPv6Network("2000::/3")
_DOCUMENTATION = IPv6Network("3fff::/20")
# Translators reach an IPv4 address, the last 32 bits, through these (RFC 6052).
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))

# Older Pythons count most of it as global.
_PROTOCOLS = IPv4Network("192.0.0.0/24")


class PrivateAddress(OSError):
    """A host's address is not public."""


def is_public(address: str) -> bool:
    """Whether an IP address is public, and so is the one that it contains, if it does."""
    try:
        given = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(_is_global(each) for each in _contained(given))


def _is_global(address: IPv4Address | IPv6Address) -> bool:
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return address not in _PROTOCOLS
    known = any(address in network for network in (_UNICAST, *_TRANSLATED))
    return known and address not in _DOCUMENTATION


def _contained(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address | IPv6Address]:
    """The addresses that packets to an address may reach."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if any(address in network for network in _TRANSLATED):
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo


class PublicResolver(AbstractResolver):
    """Resolves the names of hosts, all of whose addresses must be public.

    The connection is made to the addresses that were checked: a name cannot resolve to another
    address in between.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host.

        Raises:
            PrivateAddress: one of them is not public.
            OSError: the host has none.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, (address, *_) in found:
            if not is_public(str(address)):
                raise PrivateAddress(f"{host[:100]} has an address that is not public")
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return results

    async def close(self) -> None:
        """Holds nothing."""
