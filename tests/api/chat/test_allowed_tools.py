"""A ``tool_choice`` of the type "allowed_tools": the model may call only some of the tools."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.api.api_server import (
    CHAT,
    TOKENIZER,
    Running,
    engine_replying,
    last_prompt,
    running,
    tool,
)
from support.api.thinking_caller import TOKENIZER as CALLER
from support.api.thinking_caller import thinking_caller

NAMES = ["alpha", "beta", "gamma"]
TOOLS = [tool(name) for name in NAMES]


def allowed(mode: Any, names: list[str]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def choose(server: Running, choice: Any, path: str = "/v1/chat/completions") -> Any:
    return await server.post(path, {**CHAT, "tools": TOOLS, "tool_choice": choice})


SUBSETS = [list(s) for size in (1, 2, 3) for s in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_shown_and_callable(mode: str, names: list[str]) -> None:
    """With and without a native format of calls; it is the same request as one with fewer tools."""
    for engine, tokenizer in ((engine_replying("Hello"), TOKENIZER), (thinking_caller(), CALLER)):
        async with running(engine, tokenizer) as server:
            await choose(server, allowed(mode, names))
            got = engine.submitted[-1]
            prompt = last_prompt(server, tokenizer)
            for name in NAMES:
                assert (f'"{name}"' in prompt) == (name in names)
            fewer = [one for one in TOOLS if one["function"]["name"] in names]
            body = {**CHAT, "tools": fewer, "tool_choice": mode}
            await server.post("/v1/chat/completions", body)
            plain = engine.submitted[-1]
            assert (got.prompt, got.params.grammar) == (plain.prompt, plain.params.grammar)
            assert (got.params.grammar is None) == (mode == "auto" and tokenizer is CALLER)


BAD: list[tuple[Any, str]] = [
    (allowed("auto", ["delta"]), "'delta' is not one of the tools"),
    (allowed("required", ["alpha", "delta"]), "'delta' is not one of the tools"),
    (allowed("none", ["alpha"]), "mode"),
    (allowed(None, ["alpha"]), "mode"),
    (allowed("auto", []), "1 to 128"),
    (allowed("auto", ["alpha"] * 129), "1 to 128"),
    ({"type": "allowed_tools"}, "allowed_tools"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "alpha"}}, "1 to 128"),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["alpha"]}},
        "each of allowed_tools.tools",
    ),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
        "each of allowed_tools.tools",
    ),
]


async def test_bad_choices_are_refused() -> None:
    async with running(engine_replying("Hello")) as server:
        for choice, named in BAD:
            status, reply = await choose(server, choice)
            assert (status, reply["error"]["param"]) == (400, "tool_choice"), choice
            assert named in reply["error"]["message"], choice
        assert not server.engine.submitted


async def test_tokenize_shows_the_same_tools() -> None:
    async with running(engine_replying("Hello")) as server:
        _, all_tools = await choose(server, "auto", "/tokenize")
        _, one_tool = await choose(server, allowed("auto", ["beta"]), "/tokenize")
        assert one_tool["count"] < all_tools["count"]
