"""Every known field is done, ignored or refused, as docs/reference/fields.md says.

A request with the field is compared with one without it: what the engine is given, and the reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from support.api.api_server import Running, fix_seeds, running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from support.paths import ROOT
from tokenizers.processors import TemplateProcessing

from chairlift.api.schemas.harmless_fields import HARMLESS
from chairlift.api.schemas.known_fields import ALL, Api
from chairlift.api.schemas.unsupported import INSTEAD, neutral
from chairlift.api.server.field_table import ENDPOINTS, declared, fields_of, outcome, page
from chairlift.api.server.routes import ROUTES
from chairlift.engine.messages import Submit

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{{ (tools or []) | length }}{{ reasoning_effort }}{{ enable_thinking }}{{ mood }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FILL_IN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TOKENIZER = byte_tokenizer(TEMPLATE, special=["<think>", "</think>", *FILL_IN])
START = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
TOKENIZER._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
    single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
)
# A special token and a stop string are in every reply.
REPLY = [*TOKENIZER.encode("one ", add_special_tokens=False), START]
REPLY += [*TOKENIZER.encode("STOP two", add_special_tokens=False), TOKENIZER.eos_token_id]

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = tool("f", SCHEMA)
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
ANTHROPIC = {"name": "f", "input_schema": SCHEMA}

BASES: dict[Api, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30},
    "embeddings": {"input": "Hi there"},
    "infill": {"input_prefix": "Hi"},
    "ollama_chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "ollama_generate": {"prompt": "Hi"},
    "ollama_embed": {"input": "Hi there"},
}
NOT_GENERATING: tuple[Api, ...] = ("embeddings", "ollama_embed")


class Sample(NamedTuple):
    """A value that has an effect, and other fields that it needs for that."""

    value: Any
    needs: Mapping[str, Any] = MappingProxyType({})


# By name, or by API and name where the APIs differ.
DONE: dict[str, Sample] = {
    "add_generation_prompt": Sample(False),
    "add_special_tokens": Sample(False),
    "cache_salt": Sample("tenant"),
    "chat_template_kwargs": Sample({"mood": "cheerful"}),
    "continue_final_message": Sample(
        True,
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ),
    "dimensions": Sample(2),
    "ebnf": Sample('root ::= "a"'),
    "echo": Sample(True),
    "encoding_format": Sample("base64"),
    "format": Sample(SCHEMA),
    "frequency_penalty": Sample(0.5),
    "grammar": Sample('root ::= "a"'),
    "guided_choice": Sample(["a"]),
    "guided_grammar": Sample('start: "a"'),
    "guided_json": Sample(SCHEMA),
    "guided_regex": Sample("a+"),
    "ignore_eos": Sample(True),
    "images": Sample(["aGk="]),  # refused: the model takes none
    "include": Sample(["message.output_text.logprobs"]),
    "include_stop_str_in_output": Sample(True, {"stop": "STOP"}),
    "input": Sample("Ho"),
    "input_extra": Sample([{"filename": "a", "text": "b"}]),
    "input_prefix": Sample("Ho"),
    "input_suffix": Sample("Ho"),
    "instructions": Sample("Be kind."),
    "json_schema": Sample(SCHEMA),
    "logit_bias": Sample({"5": 1.5}),
    "logprobs": Sample(True),
    "completions.logprobs": Sample(2),
    "max_completion_tokens": Sample(3),
    "max_output_tokens": Sample(3),
    "max_tokens": Sample(3),
    "messages": Sample([{"role": "user", "content": "Ho"}]),
    "metadata": Sample({"a": "b"}),
    "min_p": Sample(0.1),
    "min_tokens": Sample(2),
    "model": Sample("another"),
    "n": Sample(2),
    "n_predict": Sample(3),
    "normalize": Sample(False),
    "options": Sample({"temperature": 0.5}),
    "output_config": Sample({"effort": "low"}),
    "parallel_tool_calls": Sample(False, {"tools": [TOOL], "tool_choice": "required"}),
    "responses.parallel_tool_calls": Sample(False, {"tools": [FLAT], "tool_choice": "required"}),
    "pooling": Sample("last"),
    "prediction": Sample({"type": "content", "content": "one"}),
    "presence_penalty": Sample(0.5),
    "previous_response_id": Sample("resp_none"),
    "priority": Sample(3),
    "prompt": Sample("Ho"),
    "raw": Sample(True),
    "reasoning": Sample({"effort": "low"}),
    "reasoning_effort": Sample("low"),
    "regex": Sample("a+"),
    "repeat_penalty": Sample(1.1),
    "repetition_penalty": Sample(1.1),
    "response_format": Sample({"type": "json_object"}),
    "seed": Sample(7),
    "skip_special_tokens": Sample(False),
    "stop": Sample("STOP"),
    "stop_sequences": Sample(["STOP"]),
    "stop_token_ids": Sample([5]),
    "store": Sample(False),
    "stream": Sample(True),
    "ollama_chat.stream": Sample(False),
    "ollama_generate.stream": Sample(False),
    "stream_options": Sample({"include_usage": True}, {"stream": True}),
    "structured_outputs": Sample({"regex": "a+"}),
    "suffix": Sample("after"),
    "system": Sample("Be kind."),
    "temperature": Sample(0.5),
    "text": Sample({"format": {"type": "json_object"}}),
    "think": Sample(False),
    "thinking": Sample({"type": "enabled", "budget_tokens": 5}),
    "thinking_token_budget": Sample(5),
    "timeout": Sample(1e-6),
    "tool_choice": Sample("required", {"tools": [TOOL]}),
    "responses.tool_choice": Sample("required", {"tools": [FLAT]}),
    "messages.tool_choice": Sample({"type": "any"}, {"tools": [ANTHROPIC]}),
    "tools": Sample([TOOL]),
    "responses.tools": Sample([FLAT]),
    "messages.tools": Sample([ANTHROPIC]),
    "top_k": Sample(5),
    "top_logprobs": Sample(2, {"logprobs": True}),
    "responses.top_logprobs": Sample(2),
    "top_p": Sample(0.5),
    "truncate": Sample(False, {"input": "x" * 3000}),  # refused: it does not fit the context
    "truncate_prompt_tokens": Sample(2),
    "user": Sample("somebody"),
}
# The only option there pads the events, which this server never does.
WITHOUT_EFFECT = {("responses", "stream_options")}

# One value of each JSON type: a field is refused, or ignored, whatever its value.
VALUES: list[Any] = [True, False, 3, 0.5, "some", ["some"], {"some": 1}]


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    def script(request: Submit, index: int) -> Scripted:
        return Scripted(REPLY if request.params.max_tokens else [], "stop", True)

    async with running(FakeEngine(model_info(vocab_size=300), script), TOKENIZER) as server:
        fix_seeds(server, monkeypatch)
        grammars = server.service.loaded.vocabulary.grammars  # type: ignore[union-attr]

        async def accept(grammar: object) -> None:
            pass

        monkeypatch.setattr(grammars, "check", accept)
        yield server


async def observe(server: Running, api: Api, body: Any) -> tuple[int, str, str]:
    """The reply's status, its text without ids and times, and what the engine was given."""
    server.engine.submitted.clear()
    path = ENDPOINTS[api][0]
    async with server.http.post(server.url + path, json=body) as response:
        text = await response.text()
    text = re.sub(r"[0-9a-f]{24,32}|\b[0-9]{10}\b", "ID", text)
    text = re.sub(r'("created_at":|_duration":|_ms":|_per_second":)[^,}]*', r"\1TIME", text)
    given = [
        (
            *(s.prompt, s.params, s.n, s.cache_salt, s.priority),
            *(s.prompt_logprobs, s.pooling, s.prediction),
        )
        for s in server.engine.submitted
    ]
    return response.status, text, str(given)


def names_with_outcome(api: Api, kind: str) -> Iterator[str]:
    found = [name for name in fields_of(api) if outcome(api, name).kind == kind]
    assert found or (api, kind) == ("ollama_embed", "refused")
    yield from found


def message_of(text: str) -> str:
    """The message of an error reply, in the format of any API."""
    error = json.loads(text)["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("api", ENDPOINTS)
async def test_fields_that_are_done_have_an_effect(server: Running, api: Api) -> None:
    without_effect = []
    for name in names_with_outcome(api, "done"):
        sample = DONE.get(f"{api}.{name}") or DONE.get(name)
        if sample is None and api in ("responses", "messages"):
            continue  # test_declared_fields tries every field of these two
        assert sample is not None, f"a value of {name} that has an effect"
        base = {**BASES[api], **sample.needs}
        without = await observe(server, api, base)
        assert without[0] == 200, (name, without)
        with_it = await observe(server, api, {**base, name: sample.value})
        if (api, name) in WITHOUT_EFFECT:
            continue
        if with_it == without or with_it[0] not in (200, 400, 404, 504):
            without_effect.append((name, with_it))
        if with_it[0] == 400:
            assert name in ("images", "previous_response_id", "truncate"), with_it
    assert not without_effect


@pytest.mark.slow
@pytest.mark.parametrize("api", ENDPOINTS)
async def test_ignored_fields_change_nothing(server: Running, api: Api) -> None:
    base = await observe(server, api, BASES[api])
    assert base[0] == 200
    for name in names_with_outcome(api, "ignored"):
        for value in VALUES:
            got = await observe(server, api, {**BASES[api], name: value})
            assert got == base, (name, value)


@pytest.mark.slow
@pytest.mark.parametrize("api", ENDPOINTS)
async def test_refused_fields_are_refused_by_name(server: Running, api: Api) -> None:
    base = await observe(server, api, BASES[api])
    # NOTE: test_declared_fields covers the fields that a request model itself refuses.
    for name in set(names_with_outcome(api, "refused")) - declared(ENDPOINTS[api][1]):
        neutral_values = neutral(name)
        for value in VALUES:
            if any(type(value) is type(one) and value == one for one in neutral_values):
                continue
            status, text, given = await observe(server, api, {**BASES[api], name: value})
            assert (status, given) == (400, "[]"), (name, value, text)
            assert message_of(text).startswith(f"{name} is not supported"), (name, text)
            error = json.loads(text)["error"]
            assert isinstance(error, str) or error.get("param", name) == name
        for value in (*neutral_values, None):
            assert await observe(server, api, {**BASES[api], name: value}) == base, (name, value)


@pytest.mark.slow
@pytest.mark.parametrize("api", ENDPOINTS)
async def test_fields_of_the_other_apis_are_refused_by_name(server: Running, api: Api) -> None:
    """Requests for embeddings ignore those that concern generation only."""
    accepted = fields_of(api)
    base = await observe(server, api, BASES[api])
    for other, (_, kind) in ENDPOINTS.items():
        for name in {*fields_of(other)} - {*accepted} - HARMLESS.keys() - {"timeout"}:
            value = next(v for v in ("some", 3) if v not in neutral(name))
            status, text, given = await observe(server, api, {**BASES[api], name: value})
            if api in NOT_GENERATING and status == 200:
                assert given == base[2]
                assert name not in ("prompt", "messages", "system", "instructions", "tools")
            else:
                assert (status, name in text) == (400, True), (name, kind, text)


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_best_of_is_refused_unless_it_is_n(server: Running, n: int) -> None:
    assert outcome("completions", "best_of") == ("refused", "except the value of `n`")
    plain = await observe(server, "completions", {"prompt": "Hi", "n": n})
    for best_of in (None, 0, 1, 2, 3):
        body = {"prompt": "Hi", "n": n, "best_of": best_of}
        got, same = await observe(server, "completions", body), best_of in (None, n)
        assert (got == plain, got[0], "best_of" in got[1]) == (same, 200 if same else 400, not same)


async def test_tokenize_accepts_complete_chat_requests(server: Running) -> None:
    body = {**BASES["chat"], "temperature": 0.5, "max_tokens": 9, "n": 2, "repeat_penalty": 2}
    assert (await server.post("/tokenize", body))[0] == 200
    status, reply = await server.post("/tokenize", {**body, "documents": [{"text": "a"}]})
    assert (status, reply["error"]["param"]) == (400, "documents")


async def test_unknown_fields_are_ignored_and_logged(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    base = await observe(server, "chat", BASES["chat"])
    assert "temprature" not in ALL
    assert await observe(server, "chat", {**BASES["chat"], "temprature": 0.5}) == base
    assert "temprature" in caplog.text


async def test_an_error_names_the_field_to_use_instead(server: Running) -> None:
    for name, instead in INSTEAD.items():
        for api in ENDPOINTS:
            accepted = declared(ENDPOINTS[api][1])
            known = api not in NOT_GENERATING or name in fields_of(api)
            if name in accepted or instead not in accepted or name in HARMLESS or not known:
                continue
            _, text, _ = await observe(server, api, {**BASES[api], name: "some"})
            assert instead in message_of(text), (api, name, text)


async def test_parts_of_requests_are_refused_by_name_too(server: Running) -> None:
    user = {"role": "user", "content": "Hi"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("images", {"messages": [{**user, "images": ["AAAA"]}]}),
        ("audio", {"messages": [{**user, "audio": {"id": "a"}}]}),
        ("prefix", {"messages": [user, {"role": "assistant", "content": "a", "prefix": True}]}),
        ("whitespace_pattern", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
        ("structures", {"response_format": {"type": "text", "structures": [1]}}),
    ]
    for name, fields in cases:
        status, reply = await server.post("/v1/chat/completions", {**BASES["chat"], **fields})
        assert (status, reply["error"]["param"]) == (400, name), reply


def test_every_request_is_in_the_table() -> None:
    """Every request that generates has a section, and every declared field a row."""
    generating = {r.request for r in ROUTES if r.request and "stream" in r.request.model_fields}
    assert generating < {kind for _, kind in ENDPOINTS.values()}
    for api in ENDPOINTS:
        for name in fields_of(api):
            assert outcome(api, name).kind in ("done", "ignored", "refused")
    overlap = {name for name in HARMLESS if neutral(name)}
    assert not overlap, "harmless fields have no neutral values"


def test_docs_have_the_table() -> None:
    """Write it with ``python -m chairlift.api.server.field_table > docs/reference/fields.md``."""
    docs = ROOT / "docs" / "reference" / "fields.md"
    assert docs.read_text() == page()
