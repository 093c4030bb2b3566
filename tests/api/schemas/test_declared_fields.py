"""Every field of OpenAI's Responses API and of Anthropic's Messages API has the outcome that the
docs tell, and none that their clients can send is missing."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import msgspec
import openai.types.responses as openai_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
)
from support.api.api_server import Running, running
from support.api.fake_engine import byte_tokenizer
from support.api.fields import Tried
from support.api.fields_of_messages import COUNTED
from support.api.fields_of_messages import FIELDS as MESSAGES
from support.api.fields_of_responses import FIELDS as RESPONSES
from support.api.fields_of_responses import TOKENS
from support.api.thinking_caller import MARKS, TEMPLATE, playing
from support.paths import ROOT
from typing_extensions import get_type_hints, is_typeddict

from chairlift.api.anthropic.request import CountTokensRequest
from chairlift.api.responses.request import CompactRequest, InputTokensRequest

DOCS = ROOT / "docs" / "reference"
HELD_BY_A_STORE = {"input: item_reference", "previous_response_id"}
ANEW = {"id", "created_at", "completed_at", "item_id", "call_id", "usage"}


# A template that shows all that a request may tell it.
TOKENIZER = byte_tokenizer(
    "{% if reasoning_effort %}Effort {{ reasoning_effort }}\n{% endif %}"
    "{% if enable_thinking is true %}Think\n{% endif %}" + TEMPLATE,
    plain=MARKS,
)


def lasting(value: Any) -> Any:
    """What is the same where the same is asked twice."""
    if isinstance(value, dict):
        return {name: lasting(inner) for name, inner in value.items() if name not in ANEW}
    return [lasting(inner) for inner in value] if isinstance(value, list) else value


async def outcome_of(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and all that a request comes to: what the engine gets, and the reply."""
    before = len(server.engine.submitted)
    if body.get("stream"):
        return 200, (
            "a stream",
            [lasting(event) for event in await server.named_events(path, body)],
        )
    status, reply = await server.post(path, body)
    if status != 200:
        return status, reply
    submitted = []
    for request in server.engine.submitted[before:]:
        fields = msgspec.to_builtins(request)
        del fields["request_id"], fields["arrival"], fields["params"]["seed"]
        submitted.append(fields)
    return status, (submitted, lasting(reply), reply.get("usage"))


async def check(server: Running, path: str, base: dict[str, Any], tried: Tried) -> None:
    """Holds the outcome against what it was to be."""
    beside = {**base, **tried.beside}
    status, got = await outcome_of(server, path, {**beside, **tried.body})
    if tried.outcome == "refused":
        assert status in (400, 404), tried
        message = got["error"]["message"]
        assert tried.named in message or tried.named in str(got["error"].get("param")), message
        return
    assert status == 200, (tried, got)
    if {**beside, **tried.body} == {**beside, "model": "org/tiny"}:
        return  # the one model there is
    _, plain = await outcome_of(server, path, beside)
    assert (got == plain) == (tried.outcome == "ignored"), tried


HI = [{"role": "user", "content": "Hi"}]
DOORS = [
    ("/v1/responses", RESPONSES, {"input": HI}),
    ("/v1/messages", MESSAGES, {"messages": HI, "max_tokens": 200}),
    ("/v1/messages/count_tokens", COUNTED, {"messages": HI}),
    ("/v1/responses/input_tokens", TOKENS, {"input": HI}),
]


@pytest.mark.parametrize(("path", "fields", "base"), DOORS, ids=[door[0] for door in DOORS])
async def test_each_field_has_its_outcome(
    path: str, fields: Sequence[Tried], base: dict[str, Any]
) -> None:
    wrong = []
    async with running(playing(), TOKENIZER) as server:
        for tried in fields:
            try:
                await check(server, path, base, tried)
            except AssertionError as error:
                wrong.append(f"{tried}: {error}")
    assert not wrong, "\n".join(wrong)


# What there is in the clients' types


def members(hint: Any) -> Iterator[Any]:
    """The typed dictionaries in a hint, however deep in unions and lists."""
    if is_typeddict(hint):
        yield hint
    else:
        for inner in typing.get_args(hint):
            yield from members(inner)


def literals(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    else:
        for inner in typing.get_args(hint):
            yield from literals(inner)


def kinds(hint: Any) -> set[str]:
    """The types of the objects in a hint, as their "type" tells them."""
    return {kind for one in members(hint) for kind in literals(get_type_hints(one)["type"])}


def names(hint: Any) -> set[str]:
    return set(get_type_hints(hint))


def prefixed(prefix: str, found: Iterable[str]) -> set[str]:
    return {prefix + name for name in found}


def all_of_responses() -> set[str]:
    asked = response_create_params.ResponseCreateParamsStreaming
    hints = get_type_hints(asked)
    content = get_type_hints(openai_types.EasyInputMessageParam)["content"]
    output = get_type_hints(openai_types.ResponseOutputMessageParam)["content"]
    [reasoning] = members(hints["reasoning"])
    [text] = members(hints["text"])
    [stream_options] = members(hints["stream_options"])
    return {
        *names(asked),
        *prefixed("tools: ", kinds(hints["tools"])),
        *prefixed("tools.function.", names(openai_types.FunctionToolParam)),
        *prefixed("tool_choice: ", kinds(hints["tool_choice"])),
        *prefixed("input: ", kinds(hints["input"])),
        *prefixed("content: ", kinds(content) | kinds(output)),
        *prefixed("reasoning.", names(reasoning)),
        *prefixed("text.", names(text)),
        *prefixed("stream_options.", names(stream_options)),
    }


def all_of_messages() -> set[str]:
    asked = (
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsStreaming,
    )
    plain, beta = (get_type_hints(one) for one in asked)
    edits = next(members(beta["context_management"]))
    results = get_type_hints(anthropic_beta.BetaToolResultBlockParam)["content"]
    users = (anthropic_types.UserMessageParam, anthropic_beta.BetaUserMessageParam)
    thinking = {name for one in members(beta["thinking"]) for name in names(one)}
    [config] = members(beta["output_config"])
    return {
        # The betas are a header.
        *(names(asked[0]) | names(asked[1])) - {"betas"},
        *prefixed("tools: ", (kinds(plain["tools"]) | kinds(beta["tools"]))),
        *prefixed("tools.", names(anthropic_beta.BetaToolParam)),
        *prefixed("tool_choice: ", kinds(beta["tool_choice"])),
        *prefixed("thinking: ", kinds(beta["thinking"])),
        *prefixed("thinking.", thinking - {"type", "budget_tokens"}),
        *prefixed("content: ", (kind for one in users for kind in kinds(names_of(one)))),
        *prefixed("content.tool_result: ", kinds(results) - {"text"}),
        *prefixed("context_management: ", kinds(get_type_hints(edits)["edits"])),
        *prefixed("output_config.", names(config)),
        *prefixed("messages.", names(anthropic_beta.BetaSystemMessageParam) - {"content"}),
    }


def names_of(message: Any) -> Any:
    return get_type_hints(message)["content"]


def test_no_field_is_missing() -> None:
    assert all_of_responses() - {tried.name for tried in RESPONSES} == set()
    assert all_of_messages() - {tried.name for tried in MESSAGES} == set()


def test_what_is_counted_or_compacted_takes_what_its_clients_send() -> None:
    counted = names(input_token_count_params.InputTokenCountParams)
    assert counted <= InputTokensRequest.model_fields.keys()
    compacted = names(response_compact_params.ResponseCompactParams)
    assert compacted <= CompactRequest.model_fields.keys()
    prompt = names(message_count_tokens_params.MessageCountTokensParams)
    assert prompt <= CountTokensRequest.model_fields.keys()


# What the docs tell


def told(page: str) -> dict[str, str]:
    """The outcome of each name in a page's tables; a row's first cell has the names."""
    rows = re.findall(r"^\| (`.*?) \| (done|ignored|refused)\b", (DOCS / page).read_text(), re.M)
    return {name: outcome for cell, outcome in rows for name in re.findall("`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("page", "fields"), [("responses.md", RESPONSES), ("messages.md", MESSAGES)]
)
def test_the_docs_tell_each_outcome(page: str, fields: Sequence[Tried]) -> None:
    outcomes: dict[str, set[str]] = {}
    for tried in fields:
        outcomes.setdefault(tried.name, set()).add(tried.outcome)
    for name in HELD_BY_A_STORE & outcomes.keys():
        outcomes[name] = {"done"}  # tests/api/responses/test_responses_items.py
    docs = told(page)
    assert docs.keys() == outcomes.keys()
    for name, outcome in docs.items():
        # What is refused may have a value that asks for nothing; what is done, one that is refused.
        strongest = next(o for o in ("done", "refused", "ignored") if o in outcomes[name])
        assert outcome == strongest, name
