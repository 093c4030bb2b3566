"""Prepares a request that continues prompts as plain text, without a chat template."""

from __future__ import annotations

import asyncio
import uuid

from aiohttp import web

from chairlift.api.admission.deadline import DEADLINE
from chairlift.api.admission.priority import priority_of
from chairlift.api.admission.ratelimit import ACCOUNT
from chairlift.api.generate.generation import Generation, TokenPrompt
from chairlift.api.generate.model_lease import leased_model
from chairlift.api.generate.prompt_tokens import prompt_tokens
from chairlift.api.generate.sampling import sampling_params
from chairlift.api.schemas.fields import Prompt
from chairlift.api.schemas.schemas import CompletionRequest
from chairlift.api.service import SERVICE, ServedModel
from chairlift.api.text.grammars import grammar_of
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Grammar


async def prepare_continuation(
    http: web.Request,
    request: CompletionRequest,
    prefix: str,
    default_max_tokens: int | None,
    *,
    fills_in: bool = False,
) -> Generation:
    """Validates ``request`` against the model and prepares its generation.

    Nothing is submitted yet: ``answer`` submits and closes the Generation.

    Args:
        http: the HTTP request that ``request`` was made from.
        request: the request as a completion.
        prefix: the beginning of the reply's id, like "cmpl-".
        default_max_tokens: the limit if the request has none; None means the remaining context.
        fills_in: the prompts are made by ``fill_in_prompt``.

    Raises: as ``chat.prepare.prepare``; ``param`` is the name of a field of CompletionRequest.
    """
    service = http.app[SERVICE]
    deadline = http[DEADLINE]
    deadline.tighten(request.timeout)
    priority = priority_of(request, http.headers)
    model = leased_model(http, request.model)
    max_choices = model.info.max_rows + model.info.max_queue
    if len(request.prompt) * request.n > max_choices:
        raise RequestError(f"prompt: at most {max_choices} choices in one request", "prompt")
    # Check the queue before tokenizing, so that refusals are cheap.
    model.client.check_room(len(request.prompt) * request.n, priority)
    fill_in = model.vocabulary.fill_in if fills_in else None
    ends = frozenset[int]() if fill_in is None else fill_in.ends
    async with deadline.limit():
        grammar = await grammar_of(request, model.vocabulary)
        prompts = [
            await _token_prompt(request, model, one, grammar, default_max_tokens, ends)
            for one in request.prompt
        ]
    name = f"{prefix}{uuid.uuid4().hex}"
    account = http[ACCOUNT]
    return Generation(model, service.recorder, request, name, prompts, priority, account)


async def _token_prompt(
    request: CompletionRequest,
    model: ServedModel,
    prompt: Prompt,
    grammar: Grammar | None,
    default_max_tokens: int | None,
    ends: frozenset[int],
) -> TokenPrompt:
    tokens = await prompt_tokens(model, prompt, request.add_special_tokens, "prompt")
    params = sampling_params(
        request,
        model,
        len(tokens),
        param="prompt",
        max_tokens=request.max_tokens,
        default_max_tokens=default_max_tokens,
        logprobs=request.logprobs,
        grammar=grammar,
        ends=ends,
    )
    # Yield to the event loop between prompts: hundreds of them must not block all streams.
    await asyncio.sleep(0)
    scored = request.logprobs if request.echo else None
    return TokenPrompt(tokens, params, prompt_logprobs=scored, ends=ends)
