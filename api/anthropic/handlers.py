"""Handlers of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.anthropic.dialogue import chat_request, prompt_request
from chairlift.api.anthropic.formatter import MessageFormatter
from chairlift.api.anthropic.replies import TokensCount
from chairlift.api.anthropic.request import CountTokensRequest, MessagesPrompt, MessagesRequest
from chairlift.api.chat.prepare import prepare, prompt_of
from chairlift.api.generate.answer import answer, json_response
from chairlift.api.generate.body import convert, read
from chairlift.api.http.requests import REQUEST_ID_KEY
from chairlift.api.schemas.names import renamed_errors
from chairlift.api.service import SERVICE

_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
}


async def create_message(http: web.Request) -> web.StreamResponse:
    """Generates the next message of a conversation."""
    request = await read(http, MessagesRequest)
    thinks = http.app[SERVICE].model(request.model).vocabulary.format.thoughts is not None
    with renamed_errors(_names(request)):
        chat = await convert(http, (await http.read(),), chat_request, request, thinks)
        # Like Anthropic's server, accept a max_tokens that exceeds the context. The stop reason
        # then says whether the context was full.
        generation = await prepare(http, chat, "msg_", fit=True)
    formatter = MessageFormatter(
        generation, request.max_tokens, http[REQUEST_ID_KEY], request.shows_thoughts
    )
    return await answer(http, chat, generation, formatter)


async def count_tokens(http: web.Request) -> web.Response:
    """Counts the tokens of a conversation's prompt; nothing is generated."""
    request = await read(http, CountTokensRequest)
    model = http.app[SERVICE].model(request.model)
    with renamed_errors(_names(request)):
        chat = await convert(http, (await http.read(),), prompt_request, request)
        async with http[DEADLINE].limit():
            tokens = (await prompt_of(chat, model)).tokens
    return json_response(TokensCount(len(tokens)))


def _names(request: MessagesPrompt) -> Mapping[str, str]:
    format = "output_config.format" if request.output_format is None else "output_format"
    return {**_NAMES, "response_format": format}
