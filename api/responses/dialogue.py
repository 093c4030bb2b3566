"""Converts a Responses request, with the stored responses that it continues, to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from chairlift.api.responses.history import messages_of
from chairlift.api.responses.inputs import items_of, references_in
from chairlift.api.responses.items import Item, is_own_id
from chairlift.api.responses.replies import Response, StoredResponse
from chairlift.api.responses.request import (
    Conversation,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesPrompt,
    ResponsesRequest,
    TextFormat,
)
from chairlift.api.responses.tools import SelectedTools, function_of, select_tools
from chairlift.api.schemas.messages import MAX_MESSAGES
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.engine.errors import RequestError

if TYPE_CHECKING:  # they import aiohttp, which worker processes do not need
    from chairlift.api.generate.generation import Generation
    from chairlift.api.responses.store import ResponseStore

Fields = dict[str, Any]


class Earlier(NamedTuple):
    """The stored responses that a request needs.

    Attributes:
        previous: the response that it continues, or None.
        referred: the responses with the items that it refers to.
    """

    previous: StoredResponse | None
    referred: Sequence[StoredResponse]

    @property
    def bodies(self) -> list[bytes]:
        """The stored JSON that must be decoded."""
        stored = [one for one in (self.previous, *self.referred) if one is not None]
        return [body for one in stored for body in (one.inputs, one.reply)]


def earlier_of(request: Conversation, store: ResponseStore, owner: str) -> Earlier:
    """Looks up the stored responses that a request needs, among those of ``owner``.

    Raises:
        UnknownResponse, UnknownItem: a response or an item is not stored.
    """
    previous = request.previous_response_id
    return Earlier(
        None if previous is None else store.get(owner, previous),
        store.containing(owner, references_in(request.input)),
    )


def conversation_of(request: Conversation, earlier: Earlier) -> list[Item]:
    """All items of the conversation, earlier ones first.

    Raises:
        RequestError: there is no item, or too many.
    """
    stored = {item.id: item for one in earlier.referred for item in one.conversation()}
    items = items_of(request.input, stored)
    if earlier.previous is not None:
        items = [*earlier.previous.conversation(), *items]
    if not items:
        raise RequestError("input: must hold at least one item", "input")
    if len(items) > MAX_MESSAGES:
        raise RequestError(f"input: at most {MAX_MESSAGES} items, earlier ones included", "input")
    return items


class Dialogue(NamedTuple):
    """A Responses request as a chat request.

    Attributes:
        chat: the chat request.
        offered: the functions that the model sees.
        inputs: a JSON list of the items of the conversation.
        item_ids: the ids of the items that later requests may refer to.
    """

    chat: ChatRequest
    offered: SelectedTools
    inputs: bytes
    item_ids: tuple[str, ...]


def dialogue_of(request: ResponsesRequest, earlier: Earlier) -> Dialogue:
    """Converts a request and the conversation before it.

    Raises:
        RequestError, pydantic.ValidationError: the conversation is empty or too long, or fields
            contradict each other.
    """
    items = conversation_of(request, earlier)
    offered = select_tools(request.tools, request.tool_choice)
    chat = ChatRequest.model_validate(
        {
            **_prompt_fields(request, items, offered),
            "stream": request.stream,
            "max_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "logprobs": request.logprobs,
            "top_logprobs": request.top_logprobs,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "timeout": request.timeout,
        }
    )
    item_ids = tuple(dict.fromkeys(item.id for item in items if is_own_id(item.id)))
    return Dialogue(chat, offered, msgspec.json.encode(items), item_ids)


def prompt_request(request: ResponsesPrompt, earlier: Earlier) -> ChatRequest:
    """A chat request with the same prompt, for counting its tokens.

    Raises:
        RequestError, pydantic.ValidationError: as ``dialogue_of``.
    """
    items = conversation_of(request, earlier)
    offered = select_tools(request.tools, request.tool_choice)
    return ChatRequest.model_validate(_prompt_fields(request, items, offered))


def _prompt_fields(
    request: ResponsesPrompt, items: Sequence[Item], offered: SelectedTools
) -> Fields:
    return {
        "model": request.model,
        "messages": messages_of(request.instructions, items),
        "tools": [{"type": "function", "function": function_of(tool)} for tool in offered.tools],
        "tool_choice": offered.choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "reasoning_effort": request.reasoning.effort,
    }


def _response_format(request: ResponsesPrompt) -> Fields:
    text_format = request.text.format
    if isinstance(text_format, JsonSchemaFormat):
        return {"type": "json_schema", "json_schema": _schema(text_format)}
    return {"type": text_format.type}


def _schema(text_format: JsonSchemaFormat) -> Fields:
    return {
        "name": text_format.name,
        "description": text_format.description,
        "schema": text_format.schema_,
        "strict": text_format.strict,
    }


def _choice(request: ResponsesRequest) -> str | Fields:
    choice = request.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _format(text_format: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> Fields:
    schema = _schema(text_format) if isinstance(text_format, JsonSchemaFormat) else {}
    return {"type": text_format.type, **schema}


def empty_response(
    request: ResponsesRequest, offered: SelectedTools, generation: Generation, store: bool
) -> Response:
    """The response object before any output is generated."""
    params = generation.prompts[0].params
    return Response(
        id=generation.id,
        created_at=generation.created,
        status="queued" if request.background else "in_progress",
        model=generation.model.name,
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        store=store,
        temperature=params.temperature,
        text={"format": _format(request.text.format)},
        tool_choice=_choice(request),
        tools=[{"type": "function", **function_of(tool)} for tool in offered.tools],
        top_logprobs=request.top_logprobs,
        top_p=params.top_p,
        user=request.user,
        background=request.background,
    )
