"""Time limits on work in threads: chat templates, and ``TimeLimitedThreads`` itself."""

from __future__ import annotations

import asyncio

import pytest
from support.api.api_server import CHAT, engine_replying, running
from support.api.fake_engine import byte_tokenizer

from chairlift.api.text import vocabulary
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
    hostile = (endless, "{{ ().__class__.__base__.__subclasses__() }}", "{{ range(10**9) }}")
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


@pytest.mark.slow
async def test_work_over_its_time_limit_ends_in_its_thread() -> None:
    turns: list[int] = []

    def endless() -> None:
        while True:
            turns.append(1)

    limited = TimeLimitedThreads(0.1)
    for _ in range(3):  # more than TimeLimitedThreads has threads
        with pytest.raises(TookTooLong):
            await limited.run(endless)
    abandoned = asyncio.create_task(limited.run(endless))
    await asyncio.sleep(0.05)
    abandoned.cancel()
    await asyncio.sleep(0.1)
    count = len(turns)
    await asyncio.sleep(0.1)
    assert count == len(turns) > 0
    assert await asyncio.gather(*(limited.run(lambda: 5) for _ in range(50))) == [5] * 50
    with pytest.raises(ZeroDivisionError):
        await limited.run(lambda: 1 // 0)
