"""Fields of OpenAI's Responses API and of Anthropic's Messages API have the documented outcome.

No field that their official clients can send is missing.
"""

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
from support.api.fields import FieldCase
from support.api.fields_of_messages import COUNT_TOKENS_FIELDS
from support.api.fields_of_messages import FIELDS as MESSAGES_FIELDS
from support.api.fields_of_responses import FIELDS as RESPONSES_FIELDS
from support.api.fields_of_responses import INPUT_TOKENS_FIELDS
from support.api.thinking_caller import MARKS, TEMPLATE, thinking_caller
from support.paths import ROOT
from typing_extensions import get_type_hints, is_typeddict

from chairlift.api.anthropic.request import CountTokensRequest
from chairlift.api.responses.request import CompactRequest, InputTokensRequest

DOCS = ROOT / "docs" / "reference"
STORED = {"input: item_reference", "previous_response_id"}
# Values that differ between two equal requests.
VARYING = {"id", "created_at", "completed_at", "item_id", "call_id", "usage"}


# A template that shows every value that a request can pass to it.
TOKENIZER = byte_tokenizer(
    "{% if reasoning_effort %}Effort {{ reasoning_effort }}\n{% endif %}"
    "{% if enable_thinking is true %}Think\n{% endif %}" + TEMPLATE,
    plain=MARKS,
)


def without_varying(value: Any) -> Any:
    """The parts of a reply that are the same for two equal requests."""
    if isinstance(value, dict):
        return {
            name: without_varying(inner) for name, inner in value.items() if name not in VARYING
        }
    return [without_varying(inner) for inner in value] if isinstance(value, list) else value


async def outcome_of(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and what the engine was given together with the reply."""
    before = len(server.engine.submitted)
    if body.get("stream"):
        return 200, (
            "a stream",
            [without_varying(event) for event in await server.named_events(path, body)],
        )
    status, reply = await server.post(path, body)
    if status != 200:
        return status, reply
    submitted = []
    for request in server.engine.submitted[before:]:
        fields = msgspec.to_builtins(request)
        del fields["request_id"], fields["arrival"], fields["params"]["seed"]
        submitted.append(fields)
    return status, (submitted, without_varying(reply), reply.get("usage"))


async def check(server: Running, path: str, base: dict[str, Any], case: FieldCase) -> None:
    """Asserts the expected outcome of a field, against the same request without it."""
    without = {**base, **case.context}
    status, got = await outcome_of(server, path, {**without, **case.body})
    if case.outcome == "refused":
        assert status in (400, 404), case
        message = got["error"]["message"]
        assert case.message in message or case.message in str(got["error"].get("param")), message
        return
    assert status == 200, (case, got)
    if {**without, **case.body} == {**without, "model": "org/tiny"}:
        return  # naming the only model changes nothing
    _, plain = await outcome_of(server, path, without)
    assert (got == plain) == (case.outcome == "ignored"), case


HI = [{"role": "user", "content": "Hi"}]
ENDPOINTS = [
    ("/v1/responses", RESPONSES_FIELDS, {"input": HI}),
    ("/v1/messages", MESSAGES_FIELDS, {"messages": HI, "max_tokens": 200}),
    ("/v1/messages/count_tokens", COUNT_TOKENS_FIELDS, {"messages": HI}),
    ("/v1/responses/input_tokens", INPUT_TOKENS_FIELDS, {"input": HI}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "base"), ENDPOINTS, ids=[endpoint[0] for endpoint in ENDPOINTS]
)
async def test_each_field_has_its_outcome(
    path: str, fields: Sequence[FieldCase], base: dict[str, Any]
) -> None:
    wrong = []
    async with running(thinking_caller(), TOKENIZER) as server:
        for case in fields:
            try:
                await check(server, path, base, case)
            except AssertionError as error:
                wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


# Fields in the clients' types


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
    """The possible values of "type" of the objects in a hint."""
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
        # The betas are sent as a header.
        *(names(asked[0]) | names(asked[1])) - {"betas"},
        *prefixed("tools: ", (kinds(plain["tools"]) | kinds(beta["tools"]))),
        *prefixed("tools.", names(anthropic_beta.BetaToolParam)),
        *prefixed("tool_choice: ", kinds(beta["tool_choice"])),
        *prefixed("thinking: ", kinds(beta["thinking"])),
        *prefixed("thinking.", thinking - {"type", "budget_tokens"}),
        *prefixed(
            "content: ", (kind for one in users for kind in kinds(get_type_hints(one)["content"]))
        ),
        *prefixed("content.tool_result: ", kinds(results) - {"text"}),
        *prefixed("context_management: ", kinds(get_type_hints(edits)["edits"])),
        *prefixed("output_config.", names(config)),
        *prefixed("messages.", names(anthropic_beta.BetaSystemMessageParam) - {"content"}),
    }


def test_no_field_is_missing() -> None:
    assert all_of_responses() - {case.name for case in RESPONSES_FIELDS} == set()
    assert all_of_messages() - {case.name for case in MESSAGES_FIELDS} == set()


def test_counting_and_compacting_accept_what_clients_send() -> None:
    counted = names(input_token_count_params.InputTokenCountParams)
    assert counted <= InputTokensRequest.model_fields.keys()
    compacted = names(response_compact_params.ResponseCompactParams)
    assert compacted <= CompactRequest.model_fields.keys()
    prompt = names(message_count_tokens_params.MessageCountTokensParams)
    assert prompt <= CountTokensRequest.model_fields.keys()


# The documented outcomes


def documented(page: str) -> dict[str, str]:
    """The outcome of each field in a page's tables; a row's first cell names the fields."""
    rows = re.findall(r"^\| (`.*?) \| (done|ignored|refused)\b", (DOCS / page).read_text(), re.M)
    return {name: outcome for cell, outcome in rows for name in re.findall("`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("page", "fields"), [("responses.md", RESPONSES_FIELDS), ("messages.md", MESSAGES_FIELDS)]
)
def test_the_docs_state_each_outcome(page: str, fields: Sequence[FieldCase]) -> None:
    outcomes: dict[str, set[str]] = {}
    for case in fields:
        outcomes.setdefault(case.name, set()).add(case.outcome)
    for name in STORED & outcomes.keys():
        outcomes[name] = {"done"}  # tests/api/responses/test_response_items.py
    docs = documented(page)
    assert docs.keys() == outcomes.keys()
    for name, outcome in docs.items():
        # A refused field may have values without effect; a field that is done, refused ones.
        strongest = next(o for o in ("done", "refused", "ignored") if o in outcomes[name])
        assert outcome == strongest, name
