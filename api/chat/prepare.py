"""Prepares a chat request for generation: its prompt, its grammar and the syntax of its reply."""

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
from chairlift.api.chat.choice import ReplySyntax
from chairlift.api.chat.rendering import rendering_of
from chairlift.api.chat.thoughts import continued_text, thought_plan
from chairlift.api.chat.tool_plan import ToolPlan, tool_plan
from chairlift.api.generate.generation import Generation, TokenPrompt
from chairlift.api.generate.model_lease import leased_model
from chairlift.api.generate.prompt_tokens import prediction_tokens
from chairlift.api.generate.sampling import sampling_params
from chairlift.api.schemas.messages import Messages, chars_of, check_arguments, images_of
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.structured import GrammarRequest
from chairlift.api.schemas.templating import Templating
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.chat_format import CALL, HEADER, NORMAL, THOUGHT, ChatFormat, Transition
from chairlift.api.text.grammars import begun, check, grammar_of
from chairlift.api.text.template import Rendering
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Grammar, ImagePrompt

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# Larger conversations are converted for the template, and larger tools to a grammar, in a thread,
# because the conversion would block all streams.
INLINE_CHARS = 64 << 10
INLINE_MESSAGES = 256


async def prompt_of(request: ChatRequest, model: ServedModel) -> ImagePrompt:
    """The prompt of a request's conversation and tools.

    Raises:
        PromptTooLong: it is longer than the model's context.
        RequestError: the model's template refuses it, or it has images that are invalid, or that
            the model does not take.
        QueueFull: too many images are waiting.
    """
    return await rendered(request.messages, request, model)


async def rendered(messages: Messages, templating: Templating, model: ServedModel) -> ImagePrompt:
    """The prompt of ``messages``, rendered with the tools and settings of ``templating``.

    Raises: as ``prompt_of``.
    """
    references = images_of(messages)
    if references and model.vision is None:
        raise RequestError(
            f"messages: the model {model.name!r} takes no images ('image_url', 'input_image', "
            "'image', 'images'), only text",
            "messages",
        )
    rendering = await _rendering(messages, templating, model)
    if model.vision is None or not references:
        return ImagePrompt(await model.vocabulary.render(rendering))
    return await model.vision.prepare(rendering, references)


async def rendered_text(messages: Messages, templating: Templating, model: ServedModel) -> str:
    """As ``rendered``, but the text, for messages without images."""
    if images_of(messages):
        raise RequestError("messages: images have no text", "messages")
    return await model.vocabulary.render_text(await _rendering(messages, templating, model))


async def _rendering(messages: Messages, templating: Templating, model: ServedModel) -> Rendering:
    vocabulary = model.vocabulary
    chars = chars_of(messages) + templating.tool_chars
    vocabulary.check_chars(chars, model.info.max_context, "messages")
    check_arguments(messages)
    shown = partial(rendering_of, messages, templating, vocabulary.format)
    large = chars > INLINE_CHARS or len(messages) > INLINE_MESSAGES
    return await asyncio.to_thread(shown) if large else shown()


async def prepare(
    http: web.Request, request: ChatRequest, prefix: str, fit: bool = False
) -> Generation:
    """Validates ``request`` against the model and prepares its generation.

    Nothing is submitted yet: ``answer`` submits and closes the Generation, and formats its reply
    for one API. Each delta of a choice is reasoning, text for the user, or part of a call, in the
    order in which the model wrote them; see ``OutputDelta``. A choice with calls finishes with
    "tool_calls".

    Args:
        http: the HTTP request that ``request`` was made from.
        request: the request as a chat completion.
        prefix: the beginning of the reply's id, like "chatcmpl-".
        fit: lower a max_tokens that exceeds the context, instead of refusing the request.

    Raises:
        NotReady, UnknownModel, QueueFull: this server cannot serve it, or not now.
        PromptTooLong, ContextExceeded, RequestError: this model cannot serve it; ``param`` is the
            name of a field of ChatRequest.
        TimedOut, Draining: the request's time limit has passed, or the server is shutting down.
    """
    service = http.app[SERVICE]
    deadline = http[DEADLINE]
    deadline.tighten(request.timeout)
    priority = priority_of(request, http.headers)
    model = leased_model(http, request.model)
    # Check the queue before rendering the prompt, so that refusals are cheap.
    model.client.check_room(request.n, priority)
    text = continued_text(request, model.vocabulary.format)
    is_required = request.effective_choice.mode == "required"
    async with deadline.limit():
        tools = await _planned_tools(request, model)
        if text and request.grammar_request is not None and not is_required:
            tools = None  # the reply has begun without a call
        prompt = await prompt_of(request, model)
        grammar = await _grammar_of(request, model, tools, text)
        prediction = None
        if request.prediction is not None:
            prediction = await prediction_tokens(model, request.prediction.content)
    thought = thought_plan(request, model.vocabulary, prompt.tokens, grammar is not None)
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
    syntax = reply_syntax(
        request, model.vocabulary, tools, thinks=thought.begun, in_text=thought.in_text
    )
    return Generation(
        model,
        service.recorder,
        request,
        f"{prefix}{uuid.uuid4().hex}",
        [
            TokenPrompt(
                *(thought.prompt, params, syntax), prediction=prediction, images=prompt.images
            )
        ],
        priority,
        http[ACCOUNT],
    )


async def _planned_tools(request: ChatRequest, model: ServedModel) -> ToolPlan | None:
    planned = partial(tool_plan, request, model.vocabulary.format)
    large = request.tool_chars > INLINE_CHARS
    return await asyncio.to_thread(planned) if large else planned()


async def _grammar_of(
    request: ChatRequest, model: ServedModel, tools: ToolPlan | None, text: str
) -> Grammar | None:
    """The grammar that the reply must follow, which has been checked to compile; or None.

    ``text`` is what the reply continues. A grammar of the reply applies to both together; calls
    come after the text.
    """
    if tools is None or tools.grammar is None:
        grammar = await grammar_of(request, model.vocabulary)
        if grammar is None or not text:
            return grammar
        return await begun(grammar, text, model.vocabulary)
    await check(GrammarRequest("tools", tools.grammar), model.vocabulary)
    return tools.grammar


def reply_syntax(
    request: ChatRequest,
    vocabulary: Vocabulary,
    tools: ToolPlan | None,
    thinks: bool,
    in_text: bool = False,
) -> ReplySyntax | None:
    """The syntax of the reply, or None if it can only be text.

    ``thinks`` is whether the prompt ends inside a thought; for ``in_text`` see ``ThoughtPlan``.
    """
    format = vocabulary.format
    syntax = None if tools is None else tools.syntax
    state = THOUGHT if thinks else NORMAL if in_text else HEADER
    show_special = not request.skip_special_tokens
    if (harmony := vocabulary.harmony_rules(state, show_special)) is not None:
        return ReplySyntax(harmony, True, syntax)
    transitions = tuple(_transitions(format, tools, request.grammar_request is not None))
    if not transitions:
        return None
    rules = vocabulary.rules(
        format.initial or (THOUGHT if thinks else NORMAL),
        transitions,
        show_special=show_special,
    )
    return ReplySyntax(rules, format.thoughts is not None, syntax)


def _transitions(
    format: ChatFormat, tools: ToolPlan | None, has_form: bool
) -> Iterator[Transition]:
    """The tags of the reply; ``has_form`` is whether a grammar is requested for its text."""
    is_constrained = tools is not None and tools.syntax.is_constrained
    # Calls under a grammar use other tags than the model's native format.
    yield from (p for p in format.transitions if not is_constrained or p.target != CALL)
    if format.thoughts is not None:
        # A start tag of several tokens is in the prompt if a grammar follows the thought
        # (``thought_plan``), so in the reply it is text of the required form.
        if not has_form or format.thoughts.start.token is not None:
            yield Transition(NORMAL, format.thoughts.start, THOUGHT)
        yield Transition(THOUGHT, format.thoughts.end, NORMAL)
    if tools is None:
        return
    start, end = tools.syntax.start, tools.syntax.end
    yield Transition(CALL, end, NORMAL)
    # A format that has its own transitions to calls needs no others.
    if is_constrained or not any(transition.target == CALL for transition in format.transitions):
        yield Transition(NORMAL, start, CALL)
        if format.initial not in (None, NORMAL, THOUGHT):
            yield Transition(format.initial, start, CALL)
    # Some models begin a call without ending their thought.
    if not is_constrained and start.token is not None:
        yield Transition(THOUGHT, start, CALL)
