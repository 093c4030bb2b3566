"""Binds the server's sockets before anything slow is imported, so that a port in use fails at once.

All systems follow Linux's rule. An address is in use if another server listens on it or on the
wildcard address of its family. A wildcard address is in use if another server listens on any
address of its family. BSD and macOS would let both servers listen and pass connections to the more
specific address. If the port is in use on an address that does not overlap, binding succeeds with a
warning.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from chairlift.api.settings import ServerSettings

logger = logging.getLogger(__name__)

# The name, the wildcard address and the loopback address of each family.
_FAMILIES = {
    socket.AF_INET: ("IPv4", "0.0.0.0", "127.0.0.1"),
    socket.AF_INET6: ("IPv6", "::", "::1"),
}
# A port that the system chose for one address may be in use on another address.
_ATTEMPTS = 20
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class _Address(NamedTuple):
    """``rest`` is the part of a socket's address after the port: IPv6's flow info and scope."""

    family: socket.AddressFamily
    host: str
    rest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """The sockets of one host and port, one for each address of the host.

    Clients cannot connect until the sockets listen.
    """

    host: str
    port: int
    sockets: tuple[socket.socket, ...]

    def refusal(self, error: OSError) -> OSError:
        """An error with a one-line message about ``error`` of these sockets."""
        return _refusal(self.host, self.port, error)

    def close(self) -> None:
        """Closes the sockets, if they are open."""
        for each in self.sockets:
            each.close()


def bind(host: str, port: int) -> Binding:
    """Binds all addresses of ``host``.

    Args:
        host: a name or an address; "" means all addresses of IPv4 and IPv6.
        port: 0 means a free port, the same for all addresses.

    Raises:
        OSError: an address cannot be bound; the message is one line with address and reason.
    """
    try:
        addresses = _addresses(host, port)
        families = [family for family in _FAMILIES if port and _used(family, port)]
        sockets = _bound(addresses, port)
    except (OSError, ValueError) as error:  # an invalid name is a UnicodeError or a ValueError
        raise _refusal(host, port, error) from error
    if families:
        names = " and ".join(_FAMILIES[family][0] for family in families)
        logger.warning(
            "port %d is also in use by another server, on another address (%s); a client that "
            "connects to a name, like localhost, may reach either server",
            *(port, names),
        )
    return Binding(host, port, sockets)


@dataclass(frozen=True, slots=True)
class Sockets:
    """All sockets of one server. ``metrics`` None means that ``api`` also serves /metrics."""

    api: Binding
    metrics: Binding | None

    def close(self) -> None:
        """Closes the sockets, if they are open."""
        for binding in (self.api, self.metrics):
            if binding is not None:
                binding.close()


def bind_all(settings: ServerSettings) -> Sockets:
    """Binds the sockets of a server with these settings.

    Raises:
        OSError: as ``bind``.
    """
    api = bind(settings.host, settings.port)
    try:
        port = settings.metrics_port
        return Sockets(api, None if port is None else bind(settings.metrics_host, port))
    except OSError:
        api.close()
        raise


def _refusal(host: str, port: int, error: OSError | ValueError) -> OSError:
    shown = f"[{host}]" if ":" in host else host
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        reason += " by a server on this address, or on one that overlaps it"
    return OSError(f"cannot listen on {shown}:{port}: {reason}")


def _addresses(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = [
        _Address(family, str(name), tuple(map(int, rest)))
        for family, _, _, _, (name, _, *rest) in found
    ]
    return list(dict.fromkeys(addresses))


def _bound(addresses: list[_Address], port: int) -> tuple[socket.socket, ...]:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _bound_once(addresses, port)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or attempt == _ATTEMPTS:
                raise
    raise AssertionError("returned or raised")


def _bound_once(addresses: list[_Address], port: int) -> tuple[socket.socket, ...]:
    sockets: list[socket.socket] = []
    missing = None
    with ExitStack() as stack:
        for address in addresses:
            try:
                if port and sys.platform != "linux":
                    _refuse_overlap(address, port)
                bound = stack.enter_context(_socket(address, port))
            except OSError as error:
                # localhost resolves to ::1 even on machines without IPv6.
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            port = bound.getsockname()[1]
            sockets.append(bound)
        if not sockets:
            raise missing or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        stack.pop_all()
    return tuple(sockets)


def _socket(address: _Address, port: int) -> socket.socket:
    with ExitStack() as stack:
        made = stack.enter_context(socket.socket(address.family, socket.SOCK_STREAM))
        # Ignore leftover connections of a server that has just ended.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address.host, port, *address.rest))
        stack.pop_all()
    return made


def _refuse_overlap(address: _Address, port: int) -> None:
    """Raises the error that Linux would raise if a socket listens on an overlapping address."""
    _, wildcard, loopback = _FAMILIES[address.family]
    overlapping = loopback if address.host == wildcard else wildcard
    if _listens(address.family, overlapping, port):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _used(family: socket.AddressFamily, port: int) -> bool:
    """Whether another server listens on that port.

    On Linux this covers all addresses of the family, on other systems only the wildcard and
    loopback addresses.
    """
    return any(_listens(family, host, port) for host in _FAMILIES[family][1:])


def _listens(family: socket.AddressFamily, host: str, port: int) -> bool:
    """Whether binding an address is refused because of another socket's."""
    try:
        _socket(_Address(family, host), port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
