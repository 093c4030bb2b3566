"""A conversation is made a prompt, and is handed to the engine: for every door that chats."""

from __future__ import annotations

import uuid

from aiohttp import web

from chairlift.api.deadline import DEADLINE
from chairlift.api.generation import Generation, TokenPrompt
from chairlift.api.messages import chars_of
from chairlift.api.priority import priority_of
from chairlift.api.ratelimit import ACCOUNT
from chairlift.api.sampling import sampling_params
from chairlift.api.schemas import ChatRequest
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.structured import grammar_of


async def prompt_of(request: ChatRequest, model: ServedModel) -> list[int]:
    """The token ids of a conversation, its tools told to the model.

    Raises:
        PromptTooLong, RequestError: it cannot be a prompt of this model.
    """
    vocabulary = model.vocabulary
    vocabulary.check_chars(chars_of(request.messages), model.info.max_context, "messages")
    return await vocabulary.render(request.messages, request.opens_a_reply)


async def prepare(
    http: web.Request, request: ChatRequest, prefix: str, fit: bool = False
) -> Generation:
    """What is to be generated for ``request``, which came by ``http`` or was made of what did.

    ``prefix`` begins the reply's id, as in "chatcmpl-". With ``fit``, a max_tokens that the context
    has no room for is as much as it has; else it is refused. Nothing is submitted yet: that, and
    closing it, is ``answer``'s, with the door's own Shape. The pieces of its choices are, each of
    one kind and in the order in which the model wrote them, its thought, text for the user, and
    calls; see ``Piece``. A choice with calls finishes with "tool_calls".

    Raises:
        NotReady, UnknownModel, QueueFull: it cannot be served now, or here.
        PromptTooLong, ContextExceeded, RequestError: it asks for what this model cannot give;
            their ``param`` is ChatRequest's name of a field.
        TimedOut, Draining: the request's time is up.
    """
    service = http.app[SERVICE]
    deadline = http[DEADLINE]
    deadline.tighten(request.timeout)
    priority = priority_of(request, http.headers)
    model = service.model(request.model)
    # Refusals are to cost next to nothing: before the prompt is made.
    model.client.check_room(request.n, priority)
    async with deadline.limit():
        tokens = await prompt_of(request, model)
        grammar = await grammar_of(request, model.vocabulary)
    max_tokens = request.max_completion_tokens or request.max_tokens
    params = sampling_params(
        request,
        model,
        len(tokens),
        param="messages",
        max_tokens=None if fit else max_tokens,
        default_max_tokens=max_tokens if fit else None,
        logprobs=request.top_logprobs if request.logprobs else None,
        grammar=grammar,
    )
    return Generation(
        model,
        service.recorder,
        request,
        f"{prefix}{uuid.uuid4().hex}",
        [TokenPrompt(tokens, params)],
        priority,
        http[ACCOUNT],
    )
