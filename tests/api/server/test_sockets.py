"""The addresses that two servers may have at one port."""

from __future__ import annotations

import socket
import sys
from contextlib import closing

import pytest
from support.api.server_process import ipv6, linux

from chairlift.api.server import sockets
from chairlift.api.server.sockets import Binding, bind, bind_all
from chairlift.api.settings import ServerSettings

V4, V6 = {"127.0.0.1", "0.0.0.0", "127.0.0.2"}, {"::1", "::"}
BOTH = {"", "both"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolves "both" to two addresses, as some systems resolve localhost."""
    ask = socket.getaddrinfo

    def resolve(host: str | None, port: int, **options: object) -> list[object]:
        hosts = ("127.0.0.1", "::1") if host == "both" else (host,)
        return [found for each in hosts for found in ask(each, port, **options)]  # type: ignore

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def addresses(host: str) -> set[str]:
    return {"": {"0.0.0.0", "::"}, "both": {"127.0.0.1", "::1"}}.get(host, {host})


def overlap(first: str, second: str) -> bool:
    """Whether servers on these two hosts conflict, by the rule in ``sockets``."""
    return any(
        {one, other} <= family and (one == other or {one, other} & {"0.0.0.0", "::"})
        for one in addresses(first)
        for other in addresses(second)
        for family in (V4, V6)
    )


@pytest.fixture(params=["this system", "another system"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ``bind`` has to look for conflicts itself, as on systems other than Linux."""
    if request.param == "another system":
        monkeypatch.setattr(sys, "platform", "other")
    return bool(request.param == "another system")


def bound_where_free(first: str, second: str) -> Binding:
    """Binds ``first`` at a port at which no other process has the addresses of ``second``."""
    while True:
        binding = bind(first, 0)
        port = binding.sockets[0].getsockname()[1]
        if overlap(first, second) or all(is_free(host, port) for host in addresses(second)):
            return binding
        binding.close()


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@ipv6
@linux
@pytest.mark.parametrize("first", sorted(V4 | V6 | BOTH))
@pytest.mark.parametrize("second", sorted(V4 | V6 | BOTH))
def test_two_hosts_at_one_port(
    first: str, second: str, elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if elsewhere and "127.0.0.2" in (first, second):
        pytest.skip("on Linux, looking for a server on 0.0.0.0 finds one on 127.0.0.1")
    with closing(bound_where_free(first, second)) as one:
        port = one.sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in one.sockets} == {port}
        assert {each.getsockname()[0] for each in one.sockets} == addresses(first)
        for each in one.sockets:
            each.listen()
        assert not caplog.records
        if overlap(first, second):
            with pytest.raises(OSError, match="Address already in use by a server on") as refused:
                bind(second, port)
            assert str(refused.value).startswith("cannot listen on ")
        else:
            with closing(bind(second, port)) as other:
                assert {each.getsockname()[1] for each in other.sockets} == {port}
                for each in other.sockets:
                    each.listen()
            (line,) = caplog.records
            assert f"port {port} is also in use by another server" in line.getMessage()


@pytest.mark.skipif(sys.platform == "linux", reason="Linux refuses by itself")
@pytest.mark.parametrize(
    ("first", "second"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("::", "::1")]
)
def test_overlapping_hosts_are_refused_on_other_systems(first: str, second: str) -> None:
    with closing(bind(first, 0)) as one:
        one.sockets[0].listen()
        with pytest.raises(OSError, match="cannot listen on"):
            bind(second, one.sockets[0].getsockname()[1])


def test_a_missing_address_family_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket

    def without_ipv6(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return make(family, *rest)

    monkeypatch.setattr(sockets.socket, "socket", without_ipv6)
    with closing(bind("both", 0)) as bound:
        assert [each.getsockname()[0] for each in bound.sockets] == ["127.0.0.1"]
    with pytest.raises(OSError, match=r"cannot listen on \[::1\]:0: Address family not"):
        bind("::1", 0)


def test_no_socket_stays_bound_when_another_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        with closing(bind("127.0.0.1", 0)) as free:
            port = free.sockets[0].getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{used}"):
            bind_all(ServerSettings(port=port, metrics_port=used))
        with socket.socket() as plain:  # without SO_REUSEADDR
            plain.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "a" * 70, "\0", "1.2.3"])
def test_an_invalid_host_is_a_one_line_error(host: str) -> None:
    with pytest.raises(OSError, match=r"^cannot listen on .*: ") as refused:
        bind(host, 0)
    assert "\n" not in str(refused.value)
