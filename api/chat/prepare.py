"""A conversation is made a prompt, and is handed to the engine: for every door that chats."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.priority import priority_of
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.chat.choice import Reading
from chairlift.api.chat.rendering import rendering_of
from chairlift.api.chat.thoughts import thought_plan
from chairlift.api.chat.tool_plan import ToolPlan, tool_plan
from chairlift.api.generate.generation import Generation, TokenPrompt
from chairlift.api.generate.sampling import sampling_params
from chairlift.api.schemas.messages import Messages, chars_of, check_arguments
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.structured import Wanted
from chairlift.api.schemas.templating import Templating
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.chat_format import CALL, NORMAL, THOUGHT, ChatFormat, Passage
from chairlift.api.text.grammars import check, grammar_of
from chairlift.engine.messages import Grammar

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary
# To bring more than this into the template's form would hold up everyone's streams.
INLINE_CHARS = 64 << 10
INLINE_MESSAGES = 256


async def prompt_of(request: ChatRequest, model: ServedModel) -> list[int]:
    """The token ids of a conversation, its tools told to the model.

    Raises:
        PromptTooLong, RequestError: it cannot be a prompt of this model.
    """
    return await rendered(request.messages, request, model)


async def rendered(messages: Messages, templating: Templating, model: ServedModel) -> list[int]:
    """The same of ``messages``, by what ``templating`` says of them."""
    vocabulary = model.vocabulary
    chars = chars_of(messages) + templating.tool_chars
    vocabulary.check_chars(chars, model.info.max_context, "messages")
    check_arguments(messages)
    shown = partial(rendering_of, messages, templating, vocabulary.format)
    large = chars > INLINE_CHARS or len(messages) > INLINE_MESSAGES
    return await vocabulary.render(await asyncio.to_thread(shown) if large else shown())


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
    tools = tool_plan(request, model.vocabulary.format)
    async with deadline.limit():
        tokens = await prompt_of(request, model)
        grammar = await _grammar_of(request, model, tools)
    thought = thought_plan(request, model.vocabulary, tokens, grammar is not None)
    max_tokens = request.max_completion_tokens or request.max_tokens
    params = sampling_params(
        request,
        model,
        len(thought.prompt),
        param="messages",
        max_tokens=None if fit else max_tokens,
        default_max_tokens=max_tokens if fit else None,
        logprobs=request.top_logprobs if request.logprobs else None,
        grammar=grammar,
        thinking=thought.thinking,
    )
    reading = reading_of(request, model.vocabulary, tools, thinks=thought.begun)
    return Generation(
        model,
        service.recorder,
        request,
        f"{prefix}{uuid.uuid4().hex}",
        [TokenPrompt(thought.prompt, params, reading)],
        priority,
        http[ACCOUNT],
    )


async def _grammar_of(
    request: ChatRequest, model: ServedModel, tools: ToolPlan | None
) -> Grammar | None:
    """What the reply is held to, which is known to be possible."""
    if tools is None or tools.grammar is None:
        return await grammar_of(request, model.vocabulary)
    await check(Wanted("tools", tools.grammar), model.vocabulary)
    return tools.grammar


def reading_of(
    request: ChatRequest, vocabulary: Vocabulary, tools: ToolPlan | None, thinks: bool
) -> Reading | None:
    """How the reply is read; None if it can only be text.

    ``thinks``: the prompt has begun a thought.
    """
    format = vocabulary.format
    passages = tuple(_passages(format, tools))
    if not passages:
        return None
    rules = vocabulary.rules(
        format.initial or (THOUGHT if thinks else NORMAL),
        passages,
        show_special=not request.skip_special_tokens,
    )
    return Reading(rules, format.thoughts is not None, None if tools is None else tools.reading)


def _passages(format: ChatFormat, tools: ToolPlan | None) -> Iterator[Passage]:
    is_held = tools is not None and tools.reading.is_held
    # A grammar's calls stand in other tags than a format's own.
    yield from (p for p in format.passages if not is_held or p.target != CALL)
    if format.thoughts is not None:
        yield Passage(NORMAL, format.thoughts.start, THOUGHT)
        yield Passage(THOUGHT, format.thoughts.end, NORMAL)
    if tools is None:
        return
    start, end = tools.reading.start, tools.reading.end
    yield Passage(CALL, end, NORMAL)
    # A format that leads to calls by itself says from where.
    if is_held or not any(passage.target == CALL for passage in format.passages):
        yield Passage(NORMAL, start, CALL)
        if format.initial not in (None, NORMAL, THOUGHT):
            yield Passage(format.initial, start, CALL)
    # Some models begin a call without ending their thought.
    if not is_held and start.token is not None:
        yield Passage(THOUGHT, start, CALL)
