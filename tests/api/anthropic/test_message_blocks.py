"""/v1/messages over HTTP: blocks that are documents, and thinking that is redacted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api.api_server import Running, engine_replying, last_prompt, running

PATH = "/v1/messages"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODY = {"messages": MESSAGES, "max_tokens": 100}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "words"}
REDACTED = {"type": "redacted_thinking", "data": "EmwKAhgB"}
TITLED = {"type": "document", "source": PLAIN, "title": "Title", "context": "Of 2024"}
LISTED = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]},
    "citations": {"enabled": True},
}
ASK = {"type": "text", "text": "What is it?"}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(engine_replying("Hello")) as server:
        yield server


@pytest.mark.parametrize(
    ("blocks", "content"),
    [
        ([TITLED, ASK], "Title\n\nOf 2024\n\nwords\n\nWhat is it?"),
        ([ASK, ASK, LISTED], "What is it?What is it?\n\nab"),
        ([{**LISTED, "title": None}, {**TITLED, "context": None}], "ab\n\nTitle\n\nwords"),
        ([{"type": "document", "source": {"type": "content", "content": "x"}}], "x"),
    ],
)
async def test_documents_are_texts(server: Running, blocks: list[Any], content: str) -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": blocks}
    turns = [
        *({"role": "user", "content": blocks}, {"role": "assistant", "content": [use]}),
        {"role": "user", "content": [result]},
    ]
    status, _ = await server.post(PATH, {**BODY, "messages": turns[:1]})
    assert (status, f"user\n{content}<|im_end|>" in last_prompt(server)) == (200, True)
    status, _ = await server.post(PATH, {**BODY, "messages": turns})
    assert (status, last_prompt(server).count(content)) == (200, 2)


async def test_redacted_thinking_is_left_out(server: Running) -> None:
    async def prompt(*content: Any) -> str:
        assistant = {"role": "assistant", "content": list(content)}
        turns = [*MESSAGES, assistant, *MESSAGES]
        status, reply = await server.post(PATH, {**BODY, "messages": turns})
        assert status == 200, reply
        return last_prompt(server)

    for rest in ([ASK], [{"type": "thinking", "thinking": "Hm", "signature": ""}, ASK], []):
        assert await prompt(REDACTED, *rest) == await prompt(*rest)
    # It is no text that a reply could continue.
    turns = [*MESSAGES, {"role": "assistant", "content": [REDACTED]}]
    status, reply = await server.post(PATH, {**BODY, "messages": turns})
    assert (status, "only a text can be continued" in reply["error"]["message"]) == (400, True)
