"""Reloading the API keys leaves running streams alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_server import engine_replying, running, until
from support.api.credentials import ALICE, BOB, CAROL, bearer, write_keys

from chairlift.api.admission.accounts import Accounts
from chairlift.api.admission.keys import (
    NO_LIMITS,
    ApiKey,
    KeyLimits,
    digest_of,
    given_keys,
    read_keys,
)
from chairlift.api.admission.ratelimit import Account
from chairlift.api.errors import Unauthorized
from chairlift.api.server.reload import Reloader
from chairlift.api.service import Service
from chairlift.api.settings import ServerSettings


@pytest.mark.slow
async def test_new_keys_apply_to_new_requests_and_running_streams_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, alice=f'"{ALICE}"\nmax_streams = 2', bob=f'"{BOB}"')
    limits = KeyLimits(rpm=50)
    slow = engine_replying("x" * 150, step_seconds=0.01)
    async with running(
        slow, keys=read_keys(path, limits), api_key_file=path, anonymous=limits
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
        # Alice's key changes, Bob's is removed, Carol's is added.
        write_keys(path, alice=f'"{ALICE}-2"\nmax_streams = 2', carol=f'"{CAROL}"')
        await reloader.reload()
        assert [await status(key) for key in (ALICE, BOB)] == [401, 401]
        # Running streams still count against the same name.
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
def test_changed_limits_keep_the_usage_so_far(
    before: KeyLimits, after: KeyLimits, spent: int, streams: int
) -> None:
    """Usage under a limit that stays set counts as if the new limit had always applied.

    A limit that is new starts unused.
    """
    account, always = (Account("a", limits, lambda: 0.0) for limits in (before, after))
    for each in (account, always):
        each.begin(spent, streams)
    account.limit(after)
    assert account.streams == always.streams == streams
    unused = Account("a", after, lambda: 0.0)
    shown = account.headers()
    for limit, name in (("tpm", "tokens"), ("rpm", "requests")):
        counted = getattr(before, limit) is not None
        wanted = (always if counted else unused).headers()
        for header in ("limit", "remaining", "reset"):
            key = f"x-ratelimit-{header}-{name}"
            assert shown.get(key) == wanted.get(key)


@given(st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=5))
def test_only_the_newest_keys_are_accepted(turns: list[set[str]]) -> None:
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
                # A key that was never removed keeps its account.
                assert (account is seen.get(name)) or name not in before
                seen[name] = account
            else:
                with pytest.raises(Exception, match="not known here"):
                    accounts.account_for(bearer(name * 9))
        before = names


async def test_a_signal_during_a_reload_causes_another_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, alice=f'"{ALICE}"')
    settings = ServerSettings(api_key_file=path, keys=read_keys(path, NO_LIMITS))
    service = Service(settings)
    reloader = Reloader(settings, service.accounts, None, service.recorder)
    task = asyncio.create_task(reloader.run())
    for turn in range(20):
        write_keys(path, alice=f'"{ALICE}{turn}"')
        for _ in range(turn % 3 + 1):
            reloader.request()
        await asyncio.sleep(0.002 * (turn % 5))

    def account() -> str | None:
        try:
            return service.accounts.account_for(bearer(f"{ALICE}19")).name
        except Unauthorized:
            return None

    await until(account)
    assert account() == "alice"
    task.cancel()


async def test_keys_of_flags_and_variables_outlive_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write_keys(path, alice=f'"{ALICE}"')
    given = given_keys(["of-a-flag"], NO_LIMITS)
    keys = read_keys(path, NO_LIMITS, given)
    settings = ServerSettings(api_key_file=path, keys=keys, given_keys=given)
    service = Service(settings)
    write_keys(path, carol='"another-key"')
    await Reloader(settings, service.accounts, None, service.recorder).reload()
    for key, name in (("of-a-flag", "default"), ("another-key", "carol")):
        assert service.accounts.account_for(bearer(key)).name == name
    with pytest.raises(Unauthorized):
        service.accounts.account_for(bearer(ALICE))
