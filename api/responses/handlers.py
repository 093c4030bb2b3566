"""POST /v1/responses, and what may be asked about a stored response."""

from __future__ import annotations

import msgspec
from aiohttp import web

from chairlift.api.answer import answer, json_response
from chairlift.api.body import convert, read
from chairlift.api.dialogue import prepare
from chairlift.api.names import renamed
from chairlift.api.ratelimit import ACCOUNT
from chairlift.api.responses.dialogue import dialogue_of, empty_response
from chairlift.api.responses.page import page_of
from chairlift.api.responses.replies import DeletedResponse, Response
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.responses.shape import ResponseShape
from chairlift.api.responses.store import ResponseStore, StoredResponse
from chairlift.api.service import SERVICE
from chairlift.engine.errors import RequestError

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


async def create_response(http: web.Request) -> web.StreamResponse:
    """Answers items, after those of an earlier response if one is named."""
    request = await read(http, ResponsesRequest)
    store, owner = http.app[SERVICE].responses, http[ACCOUNT].name
    stores = _stores(request, store)
    previous = None
    if request.previous_response_id is not None:
        previous = store.get(owner, request.previous_response_id, "previous_response_id")
    bodies = [await http.read()]
    if previous is not None:
        bodies += (previous.inputs, previous.reply)
    with renamed(_NAMES):
        dialogue = await convert(http, bodies, dialogue_of, request, previous)
        generation = await prepare(http, dialogue.chat, "resp_")

    def keep(response: Response) -> None:
        if stores:
            reply = msgspec.json.encode(response)
            store.put(owner, StoredResponse(response.id, reply, dialogue.inputs))

    vocabulary = generation.model.vocabulary if request.logprobs else None
    shape = ResponseShape(empty_response(request, generation, stores), vocabulary, keep)
    return await answer(http, dialogue.chat, generation, shape)


async def get_response(http: web.Request) -> web.Response:
    """A stored response."""
    if http.query.get("stream", "false") != "false":
        raise RequestError("stream is not supported: no stored response is still running", "stream")
    stored = http.app[SERVICE].responses.get(http[ACCOUNT].name, http.match_info["response_id"])
    return web.Response(body=stored.reply, content_type="application/json")


async def delete_response(http: web.Request) -> web.Response:
    """Forgets a stored response; those that went on from it stay whole."""
    response_id = http.match_info["response_id"]
    http.app[SERVICE].responses.delete(http[ACCOUNT].name, response_id)
    return json_response(DeletedResponse(response_id))


async def list_input_items(http: web.Request) -> web.Response:
    """The items that a stored response was made of, those of earlier responses included."""
    stored = http.app[SERVICE].responses.get(http[ACCOUNT].name, http.match_info["response_id"])
    items = await convert(http, (stored.inputs,), StoredResponse.input_items, stored)
    return json_response(page_of(items, http.query))


async def cancel_response(http: web.Request) -> web.Response:
    """Says that there is nothing to cancel: no response is made in the background."""
    http.app[SERVICE].responses.get(http[ACCOUNT].name, http.match_info["response_id"])
    raise RequestError("only a response made in the background can be cancelled; none is here")


def _stores(request: ResponsesRequest, store: ResponseStore) -> bool:
    if request.store and not store.most_bytes:
        raise RequestError("store is not supported: this server keeps no responses", "store")
    return bool(store.most_bytes) and request.store is not False
