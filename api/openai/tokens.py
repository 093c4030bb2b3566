"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's formats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from chairlift.api.chat.prepare import rendered
from chairlift.api.generate.answer import json_response
from chairlift.api.generate.body import read
from chairlift.api.schemas.replies import DetokenizeReply, TokenizeReply
from chairlift.api.schemas.schemas import DetokenizeRequest, TokenizeRequest
from chairlift.api.service import SERVICE
from chairlift.engine.errors import Overflow, PromptTooLong

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# Tokens decoded between two turns of the event loop; an uncached one takes 20 µs.
TEXTS_AT_ONCE = 256


async def tokenize(http: web.Request) -> web.Response:
    """Tokenizes a text or a conversation."""
    request = await read(http, TokenizeRequest)
    model = http.app[SERVICE].model(request.model)
    vocabulary = model.vocabulary
    context = model.info.max_context
    if request.messages is not None:
        tokens = (await rendered(request.messages, request, model)).tokens
    else:
        prompt = request.prompt or ""
        vocabulary.check_chars(len(prompt), context, "prompt")
        tokens = await vocabulary.encode(prompt, request.add_special_tokens)
    reply = TokenizeReply(len(tokens), context, tokens)
    if request.return_token_strs:
        reply.token_strs = await _texts(tokens, vocabulary)
    return json_response(reply)


async def _texts(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The text of each token on its own."""
    texts: list[str] = []
    for start in range(0, len(tokens), TEXTS_AT_ONCE):
        some = tokens[start : start + TEXTS_AT_ONCE]
        texts += [vocabulary.token_text(token).text for token in some]
        await asyncio.sleep(0)
    return texts


async def detokenize(http: web.Request) -> web.Response:
    """Decodes tokens to text."""
    request = await read(http, DetokenizeRequest)
    model = http.app[SERVICE].model(request.model)
    vocabulary = model.vocabulary
    tokens, context = len(request.tokens), model.info.max_context
    if tokens > context:
        overflow = Overflow(tokens, context)
        raise PromptTooLong(f"tokens: at most {context}, the context", overflow, "tokens")
    vocabulary.check_ids(request.tokens, "tokens")
    return json_response(DetokenizeReply(await vocabulary.decode(request.tokens)))


async def tokenizer_info(http: web.Request) -> web.Response:
    """The tokenizer's special tokens and limits, for clients that tokenize on the server."""
    return json_response(http.app[SERVICE].model().vocabulary.roles)
