"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from chairlift.api.answer import answer, json_response
from chairlift.api.anthropic.dialogue import chat_request, prompt_request
from chairlift.api.anthropic.replies import TokensCount
from chairlift.api.anthropic.request import CountTokensRequest, MessagesRequest
from chairlift.api.anthropic.shape import MessageShape
from chairlift.api.body import convert, read
from chairlift.api.deadline import DEADLINE
from chairlift.api.dialogue import prepare, prompt_of
from chairlift.api.exchange import GIVEN_ID
from chairlift.api.names import renamed
from chairlift.api.service import SERVICE

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


async def create_message(http: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    request = await read(http, MessagesRequest)
    thinks = http.app[SERVICE].model(request.model).vocabulary.format.thoughts is not None
    with renamed(_NAMES):
        chat = await convert(http, (await http.read(),), chat_request, request, thinks)
        # As Anthropic's: what there is no room for is told by the reason to stop.
        generation = await prepare(http, chat, "msg_", fit=True)
    shape = MessageShape(generation, request.max_tokens, http[GIVEN_ID])
    return await answer(http, chat, generation, shape)


async def count_tokens(http: web.Request) -> web.Response:
    """How many tokens a conversation's prompt has; nothing is generated."""
    request = await read(http, CountTokensRequest)
    chat = await convert(http, (await http.read(),), prompt_request, request)
    model = http.app[SERVICE].model(request.model)
    async with http[DEADLINE].limit():
        tokens = await prompt_of(chat, model)
    return json_response(TokensCount(len(tokens)))
