"""Handlers of /v1/responses: create, count tokens, compact, and read stored responses."""

from __future__ import annotations

import msgspec
from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.body import convert, read
from chairlift.api.chat.prepare import prepare, prompt_of
from chairlift.api.errors import UnknownPrevious, UnknownResponse
from chairlift.api.generate.answer import answer, json_response
from chairlift.api.responses.compacting import CompactionFormatter, compaction_of
from chairlift.api.responses.dialogue import (
    Earlier,
    dialogue_of,
    earlier_of,
    empty_response,
    prompt_request,
)
from chairlift.api.responses.formatter import ResponseFormatter
from chairlift.api.responses.page import page_of
from chairlift.api.responses.replies import DeletedResponse, InputTokens, Response
from chairlift.api.responses.request import (
    CompactRequest,
    Conversation,
    InputTokensRequest,
    ResponsesRequest,
)
from chairlift.api.responses.store import RESPONSE_STORE, ResponseStore, StoredResponse
from chairlift.api.schemas.names import renamed_errors
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


async def create_response(http: web.Request) -> web.StreamResponse:
    """Generates a response to the request's items, perhaps continuing an earlier response."""
    request = await read(http, ResponsesRequest)
    store, owner = http.app[RESPONSE_STORE], http[ACCOUNT].name
    stores = _stores(request, store)
    earlier, bodies = await _earlier(http, request)
    with renamed_errors(_NAMES):
        dialogue = await convert(http, bodies, dialogue_of, request, earlier)
        generation = await prepare(http, dialogue.chat, "resp_")

    def keep(response: Response) -> None:
        if stores:
            reply = msgspec.json.encode(response)
            item_ids = (*dialogue.item_ids, *(item.id for item in response.output))
            store.put(owner, StoredResponse(response.id, reply, dialogue.inputs, item_ids))

    vocabulary = generation.model.vocabulary if request.logprobs else None
    empty = empty_response(request, dialogue.offered, generation, stores)
    return await answer(http, dialogue.chat, generation, ResponseFormatter(empty, vocabulary, keep))


async def count_input_tokens(http: web.Request) -> web.Response:
    """Counts the tokens of the prompt; nothing is generated."""
    request = await read(http, InputTokensRequest)
    earlier, bodies = await _earlier(http, request)
    model = http.app[SERVICE].model(request.model)
    with renamed_errors(_NAMES):
        chat = await convert(http, bodies, prompt_request, request, earlier)
        async with http[DEADLINE].limit():
            tokens = await prompt_of(chat, model)
    return json_response(InputTokens(len(tokens)))


async def compact_response(http: web.Request) -> web.StreamResponse:
    """Replies with items that replace a conversation: the user's messages and a summary."""
    request = await read(http, CompactRequest)
    earlier, bodies = await _earlier(http, request)
    with renamed_errors(_NAMES):
        compaction = await convert(http, bodies, compaction_of, request, earlier)
        # The summary may use all of the remaining context.
        generation = await prepare(http, compaction.chat, "resp_", fit=True)
    formatter = CompactionFormatter(compaction.kept, generation)
    return await answer(http, compaction.chat, generation, formatter)


async def get_response(http: web.Request) -> web.Response:
    """Returns a stored response."""
    if http.query.get("stream", "false") != "false":
        raise RequestError("stream is not supported: no stored response is still running", "stream")
    stored = http.app[RESPONSE_STORE].get(http[ACCOUNT].name, http.match_info["response_id"])
    return web.Response(body=stored.reply, content_type="application/json")


async def delete_response(http: web.Request) -> web.Response:
    """Deletes a stored response. Responses that continue it have their own copy of its items."""
    response_id = http.match_info["response_id"]
    http.app[RESPONSE_STORE].delete(http[ACCOUNT].name, response_id)
    return json_response(DeletedResponse(response_id))


async def list_input_items(http: web.Request) -> web.Response:
    """Lists the input items of a stored response, including those of earlier responses."""
    stored = http.app[RESPONSE_STORE].get(http[ACCOUNT].name, http.match_info["response_id"])
    items = await convert(http, (stored.inputs,), StoredResponse.input_items, stored)
    return json_response(page_of(items, http.query))


async def cancel_response(http: web.Request) -> web.Response:
    """Replies with an error, since background responses are not supported."""
    http.app[RESPONSE_STORE].get(http[ACCOUNT].name, http.match_info["response_id"])
    raise RequestError("only background responses can be cancelled, and this server has none")


async def _earlier(http: web.Request, request: Conversation) -> tuple[Earlier, list[bytes]]:
    """The stored part of a request's conversation, and all JSON that its conversion must decode."""
    try:
        earlier = earlier_of(request, http.app[RESPONSE_STORE], http[ACCOUNT].name)
    except UnknownResponse:
        raise UnknownPrevious(
            f"Previous response with id '{request.previous_response_id}' not found.",
            "previous_response_id",
        ) from None
    return earlier, [await http.read(), *earlier.bodies]


def _stores(request: ResponsesRequest, store: ResponseStore) -> bool:
    if request.store and not store.max_bytes:
        raise RequestError("store is not supported: this server keeps no responses", "store")
    return bool(store.max_bytes) and request.store is not False
