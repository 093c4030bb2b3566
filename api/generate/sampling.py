"""Converts a validated request to the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Collection

from chairlift.api.errors import ContextExceeded
from chairlift.api.schemas.schemas import GenerationRequest
from chairlift.api.service import ServedModel
from chairlift.engine.errors import Overflow, RequestError
from chairlift.engine.messages import Grammar, ModelInfo, SamplingParams, Thinking


def sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    prompt_tokens: int,
    *,
    param: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
    thinking: Thinking | None = None,
    ends: Collection[int] = (),
) -> SamplingParams:
    """The sampling parameters of one prompt.

    Args:
        request: the request's fields; the model's defaults replace those that it leaves out.
        model: the model.
        prompt_tokens: the number of prompt tokens.
        param: the name of the prompt's field, for errors.
        max_tokens: the client's value, or None.
        default_max_tokens: used if ``max_tokens`` is None; None means the remaining context.
        logprobs: the number of most likely tokens to report, or None for no log-probabilities.
        grammar: the grammar that the output must follow, or None.
        thinking: the thought that may precede the output, or None.
        ends: the tokens that end this text, besides the model's end of a text.

    Raises:
        ContextExceeded: prompt and output exceed the context.
        RequestError: a value is out of range for this model.
    """
    vocabulary = model.vocabulary
    vocabulary.check_ids(list(request.logit_bias), "logit_bias")
    vocabulary.check_ids(request.stop_token_ids, "stop_token_ids")
    if request.n > model.info.max_choices:
        raise RequestError(f"n: at most {model.info.max_choices} choices can be computed", "n")
    room = room_for(model.info, prompt_tokens, max_tokens, param)
    if max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    if request.min_tokens > max_tokens:
        raise RequestError(f"min_tokens: must be at most max_tokens = {max_tokens}", "min_tokens")
    seed = model.seeds.getrandbits(63) if request.seed is None else request.seed & (2**63 - 1)
    # NOTE: checked at the start, so that a default never makes a request invalid.
    sampling = model.defaults.overridden_by(request)
    ends = () if request.ignore_eos else (*vocabulary.end_ids, *sorted(ends))
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=request.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if 0 < sampling.top_k < vocabulary.size else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        logprobs=logprobs,
        stop_token_ids=tuple(dict.fromkeys((*ends, *request.stop_token_ids))),
        grammar=grammar,
        thinking=thinking,
    )


def room_for(info: ModelInfo, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
    """The number of output tokens that fit the context after the prompt.

    Raises:
        ContextExceeded: fewer than ``max_tokens`` fit, or none if that is None.
        RequestError: the prompt is empty.
    """
    context = info.max_context
    if prompt_tokens == 0:
        raise RequestError(f"{param}: the prompt is empty", param)
    num_tokens = 1 if max_tokens is None else max_tokens
    if prompt_tokens + num_tokens > context:
        asked = "" if not max_tokens else f" and {max_tokens} for the completion"
        why = info.shortage(prompt_tokens + num_tokens)
        limit = f"this model's maximum context length is {context} tokens" if why is None else why
        raise ContextExceeded(
            f"{limit}; you requested {prompt_tokens} tokens in the {param}{asked}. Please reduce "
            "their length.",
            Overflow(prompt_tokens, context),
            param if prompt_tokens >= context or not max_tokens else "max_tokens",
        )
    return context - prompt_tokens
