"""Time limits on work in threads: chat templates, and ``TimeLimitedThreads`` itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.api.api_server import CHAT, engine_replying, running
from support.api.fake_engine import byte_tokenizer

from chairlift.api.text import limited, vocabulary
from chairlift.api.text.limited import TimeLimitedThreads, TookTooLong


@pytest.mark.slow
async def test_hostile_templates_time_out_and_delay_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "TEMPLATE_SECONDS", 0.5)
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    hostile = (
        endless,
        "{{ 'x' * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ range(10**9) }}",
    )
    for template in hostile:
        async with running(engine_replying("Hello")) as server:
            words = vocabulary.Vocabulary(byte_tokenizer(template), 258, server.service.workers)
            server.service.model().__dict__["vocabulary"] = words
            requests = [
                asyncio.create_task(server.post("/v1/chat/completions", CHAT)) for _ in "ab"
            ]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(2):
                status, _ = await server.get("/health")
                assert status == 200
            for status, body in await asyncio.gather(*requests):
                assert (status, "chat template" in body["error"]["message"]) == (400, True)


async def test_work_that_takes_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_GROWTH", 200 << 20)

    def growing() -> None:
        kept = []
        for _ in range(2000):
            kept.append(b"x" * (1 << 20))
            time.sleep(0.001)

    began = time.monotonic()
    with pytest.raises(TookTooLong):
        await TimeLimitedThreads(100.0).run(growing)
    assert time.monotonic() - began < 50


@pytest.mark.slow
async def test_work_over_its_time_limit_ends_in_its_thread() -> None:
    turns: list[int] = []

    def endless() -> None:
        while True:
            turns.append(1)

    threads = TimeLimitedThreads(0.1)
    for _ in range(3):  # more than TimeLimitedThreads has threads
        with pytest.raises(TookTooLong):
            await threads.run(endless)
    abandoned = asyncio.create_task(threads.run(endless))
    await asyncio.sleep(0.05)
    abandoned.cancel()
    await asyncio.sleep(0.1)
    count = len(turns)
    await asyncio.sleep(0.1)
    assert count == len(turns) > 0
    assert await asyncio.gather(*(threads.run(lambda: 5) for _ in range(50))) == [5] * 50
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
