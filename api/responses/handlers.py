"""Handlers of /v1/responses: create, count tokens, compact, and read stored responses."""

from __future__ import annotations

import msgspec
from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.chat.prepare import prepare, prompt_of
from chairlift.api.errors import UnknownPrevious, UnknownResponse
from chairlift.api.generate.answer import answer, json_response
from chairlift.api.generate.body import convert, read
from chairlift.api.generate.generation import Generation
from chairlift.api.responses.background import BACKGROUND, BackgroundResponse
from chairlift.api.responses.background_stream import first_event, stored_events, stream_events
from chairlift.api.responses.compacting import CompactionFormatter, compaction_of
from chairlift.api.responses.dialogue import (
    Earlier,
    dialogue_of,
    earlier_of,
    empty_response,
    prompt_request,
)
from chairlift.api.responses.formatter import ResponseFormatter
from chairlift.api.responses.page import item_page
from chairlift.api.responses.replies import (
    DeletedResponse,
    InputTokens,
    Response,
    StoredResponse,
)
from chairlift.api.responses.request import (
    CompactRequest,
    Conversation,
    InputTokensRequest,
    ResponsesRequest,
)
from chairlift.api.responses.store import RESPONSE_STORE, ResponseStore
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
    if request.background:
        formatter = ResponseFormatter(empty, vocabulary, lambda response: None)
        background = BackgroundResponse(
            empty, formatter, dialogue.inputs, dialogue.item_ids, keeps_events=request.stream
        )
        return await _begin(http, request, background, generation)
    formatter = ResponseFormatter(empty, vocabulary, keep)
    reply = await answer(http, dialogue.chat, generation, formatter)
    if not request.stream:
        keep(empty)  # complete now
    return reply


async def _begin(
    http: web.Request,
    request: ResponsesRequest,
    background: BackgroundResponse,
    generation: Generation,
) -> web.StreamResponse:
    """Begins to generate in the background; replies at once, or with the stream of the events."""
    try:
        generation.submit(http[DEADLINE].arrival)
    except BaseException:
        generation.close()
        raise
    http.app[BACKGROUND].begin(http[ACCOUNT].name, background, generation, request.timeout)
    if request.stream:
        return await stream_events(http, background.events(0))
    return json_response(background.response)


async def count_input_tokens(http: web.Request) -> web.Response:
    """Counts the tokens of the prompt; nothing is generated."""
    request = await read(http, InputTokensRequest)
    earlier, bodies = await _earlier(http, request)
    model = http.app[SERVICE].model(request.model)
    with renamed_errors(_NAMES):
        chat = await convert(http, bodies, prompt_request, request, earlier)
        async with http[DEADLINE].limit():
            tokens = (await prompt_of(chat, model)).tokens
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


async def get_response(http: web.Request) -> web.StreamResponse:
    """Returns a response, or the stream of its events from a number on."""
    owner, response_id = http[ACCOUNT].name, http.match_info["response_id"]
    responses = http.app[BACKGROUND]
    start = first_event(http.query)
    if start is None:
        reply = responses.current(owner, response_id).reply
        return web.Response(body=reply, content_type="application/json")
    running = responses.find(owner, response_id)
    stored = responses.current(owner, response_id)
    if stored.events is None:
        raise RequestError(
            "stream: only a response that was created with background and stream can be streamed",
            "stream",
        )
    if running is not None:
        return await stream_events(http, running.events(start))
    return await stream_events(http, stored_events(stored.events[start:]))


async def delete_response(http: web.Request) -> web.Response:
    """Deletes a stored response. Responses that continue it have their own copy of its items."""
    response_id = http.match_info["response_id"]
    await http.app[BACKGROUND].delete(http[ACCOUNT].name, response_id)
    return json_response(DeletedResponse(response_id))


async def list_input_items(http: web.Request) -> web.Response:
    """Lists the input items of a stored response, including those of earlier responses."""
    stored = http.app[BACKGROUND].current(http[ACCOUNT].name, http.match_info["response_id"])
    items = await convert(http, (stored.inputs,), StoredResponse.input_items, stored)
    return json_response(item_page(items, http.query))


async def cancel_response(http: web.Request) -> web.Response:
    """Cancels a background response; one that has ended stays as it is."""
    owner, response_id = http[ACCOUNT].name, http.match_info["response_id"]
    stored = http.app[BACKGROUND].current(owner, response_id)
    if not msgspec.json.decode(stored.reply, type=Response).background:
        raise RequestError("only a response that was created with background can be cancelled")
    stored = await http.app[BACKGROUND].cancel(owner, response_id)
    return web.Response(body=stored.reply, content_type="application/json")


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
    if request.background and (request.store is False or not store.max_bytes):
        raise RequestError("background needs a response that is stored", "background")
    if request.store and not store.max_bytes:
        raise RequestError("store is not supported: this server keeps no responses", "store")
    return bool(store.max_bytes) and request.store is not False
