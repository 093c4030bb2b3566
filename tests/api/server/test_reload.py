"""SIGHUP: keys and certificates are read again, and nothing that runs is disturbed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import ssl
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import ending, running, until
from support.api.fake_engine import FakeEngine, model_info
from support.api.server_process import ServerProcess, blocks, handles, linux, server_process
from support.api.server_process import until as until_patiently
from support.tiny import tiny_model_dir

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.keys import NO_LIMITS, ApiKey, KeyLimits, digest_of, read_keys
from chairlift.api.admission.ratelimit import Account
from chairlift.api.server.listen import listen
from chairlift.api.server.reload import Reloader
from chairlift.api.server.sockets import bind
from chairlift.api.server.tls import Certificate
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings

ALICE, BOB, CAROL = "sk-alice-secret", "sk-bob-secret", "sk-carol-secret"
HUP = signal.SIGHUP


def engine(text: str = "Hello", **settings: Any) -> FakeEngine:
    return FakeEngine(model_info(), ending(text), **settings)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, **keys: str) -> None:
    """As editors do it: a new file in the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"[{name}]\nkey = {value}\n" for name, value in keys.items()))
    new.replace(path)


class Issued:
    """Certificates for the loopback; ``write`` puts a new one in place and returns it."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.trusting = ssl.create_default_context()
        self._authority = trustme.CA()
        self._authority.configure_trust(self.trusting)
        self.other_key = trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes()

    def write(self) -> bytes:
        issued = self._authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(self.key)
        chain = [part.bytes() for part in issued.cert_chain_pems]
        self.certificate.write_bytes(b"".join(chain))
        return ssl.PEM_cert_to_DER_cert(chain[0].decode())

    async def shown(self, port: int, **options: Any) -> bytes:
        """The certificate that a new connection gets to see."""
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.trusting, **options)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(certificate)


# Keys


async def test_new_keys_count_for_new_requests_and_running_streams_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, alice=f'"{ALICE}"\nmax_streams = 2', bob=f'"{BOB}"')
    limits = KeyLimits(rpm=50)
    slow = engine("x" * 150, step_seconds=0.01)
    async with running(
        slow, keys=read_keys(path, None, limits), api_key_file=path, anonymous=limits
    ) as server:
        service = server.service
        reloader = Reloader(service.settings, service.accounts, None, service.recorder)

        async def status(key: str) -> int:
            code, _ = await server.post("/v1/completions", {"prompt": "x"}, **bearer(key))
            return int(code)

        async def streamed(key: str) -> str:
            body = {"prompt": "x", "stream": True}
            async with server.http.post(
                f"{server.url}/v1/completions", json=body, headers=bearer(key)
            ) as reply:
                assert reply.status == 200
                return await reply.text()

        streams = [asyncio.create_task(streamed(key)) for key in (ALICE, ALICE, BOB)]
        await until(lambda: len(slow.submitted) == 3)
        assert await status(CAROL) == 401
        # Alice's key is another, Bob has gone, Carol has come.
        write_keys(path, alice=f'"{ALICE}-2"\nmax_streams = 2', carol=f'"{CAROL}"')
        await reloader.reload()
        assert [await status(key) for key in (ALICE, BOB)] == [401, 401]
        # What runs for the name counts on.
        assert await status(ALICE + "-2") == 429
        assert await status(CAROL) == 200
        for broken in (None, "", "[alice", '[alice]\nkey = "short"', f"[x]\nkey = '{BOB}'\ny = 1"):
            path.unlink(missing_ok=True)
            if broken is not None:
                path.write_text(broken)
            await reloader.reload()
            assert await status(CAROL) == 200
            assert await status(BOB) == 401
        path.unlink()
        path.mkdir()
        await reloader.reload()
        assert await status(CAROL) == 200
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 6
        assert all("the API keys stay as they are" in e.getMessage() for e in errors)
        assert "secret" not in caplog.text
        for text in await asyncio.gather(*streams):
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"stop"' in text
        assert server.metric("chairlift_reloads_total", outcome="success") == 1
        assert server.metric("chairlift_reloads_total", outcome="failure") == 6
        assert await status(ALICE + "-2") == 200  # its streams have ended


_limit = st.none() | st.integers(1, 100)
_limits = st.builds(KeyLimits, rpm=_limit, tpm=_limit, max_streams=_limit)


@given(_limits, _limits, st.integers(0, 150), st.integers(0, 5))
def test_what_was_used_counts_on_against_other_limits(
    before: KeyLimits, after: KeyLimits, spent: int, streams: int
) -> None:
    """As if the limits had always been the new ones, of those that there were before."""
    account, always = (Account("a", limits, lambda: 0.0) for limits in (before, after))
    for each in (account, always):
        each.begin(spent, streams)
    account.limit(after)
    assert account.streams == always.streams == streams
    expected = Account("a", after, lambda: 0.0)
    shown = account.headers()
    for limit, name in (("tpm", "tokens"), ("rpm", "requests")):
        counted = getattr(before, limit) is not None
        wanted = (always if counted else expected).headers()
        for header in ("limit", "remaining", "reset"):
            key = f"x-ratelimit-{header}-{name}"
            assert shown.get(key) == wanted.get(key)


@given(st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=5))
def test_only_the_newest_keys_are_let_in(turns: list[set[str]]) -> None:
    def keys(names: set[str]) -> tuple[ApiKey, ...]:
        return tuple(ApiKey(name, digest_of(name * 9), NO_LIMITS) for name in sorted(names))

    accounts = Accounts(keys({"a", "z"}), NO_LIMITS)
    seen: dict[str, Account] = {"a": accounts.account_for(bearer("a" * 9))}
    before = {"a", "z"}
    for names in turns:
        accounts.replace(keys(names))
        for name in "abcdez":
            if name in names:
                account = accounts.account_for(bearer(name * 9))
                assert account.name == name
                # The same account as long as its key was always there.
                assert (account is seen.get(name)) or name not in before
                seen[name] = account
            else:
                with pytest.raises(Exception, match="not known here"):
                    accounts.account_for(bearer(name * 9))
        before = names


async def test_signals_that_come_while_files_are_read_have_them_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, alice=f'"{ALICE}"')
    settings = ServerSettings(api_key_file=path, keys=read_keys(path, None, NO_LIMITS))
    service = Service(settings)
    reloader = Reloader(settings, service.accounts, None, service.recorder)
    task = asyncio.create_task(reloader.run())
    for turn in range(20):
        write_keys(path, alice=f'"{ALICE}{turn}"')
        for _ in range(turn % 3 + 1):
            reloader.request()
        await asyncio.sleep(0.002 * (turn % 5))
    key = bearer(f"{ALICE}19")
    await until(lambda: service.accounts._keys[0].digest == digest_of(f"{ALICE}19"))
    assert service.accounts.account_for(key).name == "alice"
    task.cancel()


# Certificates


@asynccontextmanager
async def tls_server(issued: Issued) -> AsyncIterator[tuple[Reloader, int, Service]]:
    settings = ServerSettings(ssl_certfile=issued.certificate, ssl_keyfile=issued.key)
    certificate = Certificate.from_settings(settings)
    assert certificate is not None
    service = Service(settings)
    runner = await listen(service, bind("127.0.0.1", 0), certificate.context)
    reloader = Reloader(settings, service.accounts, certificate, service.recorder)
    try:
        yield reloader, runner.addresses[0][1], service
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_a_new_certificate_is_for_new_connections(
    loop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop.run(check_certificates(tmp_path, caplog))


async def check_certificates(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    issued = Issued(folder)
    first = issued.write()
    async with tls_server(issued) as (reloader, port, service), aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{port}/version"
        assert await issued.shown(port) == first
        kept = await asyncio.open_connection("127.0.0.1", port, ssl=issued.trusting)
        second = issued.write()
        assert await issued.shown(port) == first  # nobody has asked yet
        await reloader.reload()
        # With a name and without, and in the versions of TLS that clients speak.
        assert await issued.shown(port) == second
        assert await issued.shown(port, server_hostname="127.0.0.1") == second
        old = ssl.create_default_context()
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        issued.trusting, newest = old, issued.trusting
        assert await issued.shown(port, server_hostname="nothing.example") == second
        issued.trusting = newest
        async with http.get(url, ssl=issued.trusting) as response:
            assert response.status == 200
        # A connection from before goes on.
        kept[1].write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await kept[0].readline()).startswith(b"HTTP/1.1 200")
        kept[1].close()
        good = issued.certificate.read_bytes(), issued.key.read_bytes()
        for certificate, key in (
            (b"", good[1]),
            (good[0], b""),
            (good[0][:-100], good[1]),
            (good[0], issued.other_key),
            (good[1], good[1]),
            (None, good[1]),
            (good[0], None),
        ):
            for path, content in ((issued.certificate, certificate), (issued.key, key)):
                path.unlink(missing_ok=True)
                if content is not None:
                    path.write_bytes(content)
            caplog.clear()
            await reloader.reload()
            (line,) = caplog.records
            assert line.levelname == "ERROR"
            assert "the certificate stays as it is: " in line.getMessage()
            assert str(folder) in line.getMessage()
            assert await issued.shown(port) == second
        third = issued.write()
        await reloader.reload()
        assert await issued.shown(port) == third
        failures = service.recorder.registry.get_sample_value(
            "chairlift_reloads_total", {"outcome": "failure"}
        )
        assert failures == 7


# A real process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@linux
async def test_a_server_reads_again_at_any_time_of_its_life(tiny: Path, tmp_path: Path) -> None:
    issued, path = Issued(tmp_path), tmp_path / "keys.toml"
    issued.write()
    write_keys(path, alice=f'"{ALICE}"')
    flags = ["--api-key-file", str(path), "--ssl-certfile", str(issued.certificate)]
    flags += ["--ssl-keyfile", str(issued.key), "--drain-timeout", "300"]
    with server_process(tmp_path, tiny, *flags, scheme="https") as server:
        port, pid = int(server.url.rpartition(":")[2]), server.process.pid
        # Before its loop runs: the signal waits, and is not lost.
        await until_patiently(lambda: blocks(pid, HUP) or handles(pid, HUP))
        write_keys(path, alice=f'"{ALICE}"', bob=f'"{BOB}"')
        server.signal(HUP)
        await until_patiently(lambda: "SIGHUP: read 2 API keys" in server.said)
        await server.healthy(ssl=issued.trusting)
        async with aiohttp.ClientSession(headers=bearer(BOB)) as http:
            body = {"prompt": "ab", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            async with http.post(
                f"{server.url}/v1/completions", json=body, ssl=issued.trusting
            ) as reply:
                assert reply.status == 200
                write_keys(path, carol=f'"{CAROL}"')
                new = issued.write()
                for _ in range(3):
                    server.signal(HUP)
                await until_patiently(lambda: "SIGHUP: read 1 API keys" in server.said)
                await until_patiently(lambda: server.said.count("read the certificate") > 1)
                assert await issued.shown(port) == new
                assert await status(server, BOB, issued) == 401
                assert await status(server, CAROL, issued) == 200
                path.write_text("broken")
                server.signal(HUP)
                await until_patiently(lambda: "not valid TOML" in server.said)
                assert await status(server, CAROL, issued) == 200
                server.signal(signal.SIGTERM)
                await server.healthy(503, ssl=issued.trusting)
                server.signal(HUP)
                text = await reply.text()
                assert text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"length"' in text
        while server.process.poll() is None:  # to its very end
            server.signal(HUP)
            await asyncio.sleep(0.005)
        assert await server.exit_code() == 0
        assert "Traceback" not in server.said


async def status(server: ServerProcess, key: str, issued: Issued) -> int:
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{server.url}/v1/models", ssl=issued.trusting) as response,
    ):
        return response.status


@linux
async def test_the_end_of_its_terminal_does_not_end_a_server(tiny: Path, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    with server_process(
        tmp_path,
        tiny,
        stdin=its,
        stderr=its,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as server:
        os.close(its)
        await server.healthy()
        children = server.children
        assert b"listening on" in os.read(ours, 65536)
        os.close(ours)  # it gets SIGHUP, and whatever it writes from now on is an error
        for _ in range(3):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{server.url}/v1/completions", json={"prompt": "ab"}) as response,
            ):
                assert response.status == 200
        assert server.children == children
        server.signal(signal.SIGTERM)
        assert await server.exit_code() == 0
