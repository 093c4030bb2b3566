"""From a request of the Responses API, and the response that it goes on from, to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from chairlift.api.generation import Generation
from chairlift.api.messages import MAX_MESSAGES
from chairlift.api.responses.history import messages_of
from chairlift.api.responses.inputs import items_of
from chairlift.api.responses.items import Item
from chairlift.api.responses.replies import Response
from chairlift.api.responses.request import (
    FunctionChoice,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesRequest,
    TextFormat,
)
from chairlift.api.responses.store import StoredResponse
from chairlift.api.schemas import ChatRequest
from chairlift.api.tools import ToolChoice
from chairlift.engine.errors import RequestError

Fields = dict[str, Any]


class Dialogue(NamedTuple):
    """``chat`` is what is to be answered; ``inputs`` are the items that it was made of, as JSON."""

    chat: ChatRequest
    inputs: bytes


def dialogue_of(request: ResponsesRequest, previous: StoredResponse | None) -> Dialogue:
    """What a request asks, after what was said before.

    Raises:
        RequestError, pydantic.ValidationError: nothing was said, or too much, or fields do not go
            together.
    """
    items: list[Item] = items_of(request.input)
    if previous is not None:
        items = [*previous.conversation(), *items]
    if not items:
        raise RequestError("input: must hold at least one item", "input")
    if len(items) > MAX_MESSAGES:
        raise RequestError(f"input: at most {MAX_MESSAGES} items, earlier ones included", "input")
    return Dialogue(_chat_request(request, items), msgspec.json.encode(items))


def _chat_request(request: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    return ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": messages_of(request.instructions, items),
            "stream": request.stream,
            "max_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "logprobs": request.logprobs,
            "top_logprobs": request.top_logprobs,
            "tools": [{"type": "function", "function": _function(tool)} for tool in request.tools],
            "tool_choice": _tool_choice(request),
            "parallel_tool_calls": request.parallel_tool_calls,
            "response_format": _response_format(request),
            "reasoning_effort": request.reasoning.effort,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "timeout": request.timeout,
        }
    )


def _function(tool: FunctionTool) -> Fields:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _tool_choice(request: ResponsesRequest) -> ToolChoice:
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return ToolChoice("required", choice.name)
    return ToolChoice(choice)


def _response_format(request: ResponsesRequest) -> Fields:
    given = request.text.format
    if isinstance(given, JsonSchemaFormat):
        return {"type": "json_schema", "json_schema": _schema(given)}
    return {"type": given.type}


def _schema(given: JsonSchemaFormat) -> Fields:
    return {
        "name": given.name,
        "description": given.description,
        "schema": given.schema_,
        "strict": given.strict,
    }


def _choice(request: ResponsesRequest) -> str | Fields:
    choice = request.tool_choice
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.name}


def _format(given: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> Fields:
    schema = _schema(given) if isinstance(given, JsonSchemaFormat) else {}
    return {"type": given.type, **schema}


def empty_response(request: ResponsesRequest, generation: Generation, store: bool) -> Response:
    """The response before anything is generated."""
    return Response(
        id=generation.id,
        created_at=generation.created,
        status="in_progress",
        model=generation.model.name,
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        store=store,
        temperature=request.temperature,
        text={"format": _format(request.text.format)},
        tool_choice=_choice(request),
        tools=[{"type": "function", **_function(tool)} for tool in request.tools],
        top_logprobs=request.top_logprobs,
        top_p=request.top_p,
        user=request.user,
    )
