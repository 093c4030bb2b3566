"""Converts a request's prompt, and its predicted output, to the token ids for the engine."""

from __future__ import annotations

from chairlift.api.schemas.fields import Prompt
from chairlift.api.service import ServedModel
from chairlift.engine.errors import PromptTooLong, RequestError


async def prompt_tokens(
    model: ServedModel,
    prompt: Prompt,
    add_special_tokens: bool,
    param: str,
    most: int | None = None,
) -> list[int]:
    """The token ids of ``prompt``; ``param`` is the name of its field, for errors.

    ``most`` keeps that many of them, the first ones; None keeps all.

    Raises:
        PromptTooLong: the text cannot fit the context.
        RequestError: a token id is not in the model's vocabulary.
    """
    vocabulary, context = model.vocabulary, model.info.max_context
    if isinstance(prompt, str):
        if most is not None and most <= context:
            prompt = vocabulary.beginning(prompt, context)
        vocabulary.check_chars(len(prompt), context, param)
        return (await vocabulary.encode(prompt, add_special_tokens, param))[:most]
    prompt = prompt[:most]
    if len(prompt) <= context:
        vocabulary.check_ids(prompt, param)
    return prompt


async def prediction_tokens(model: ServedModel, text: str) -> list[int]:
    """The token ids of a predicted output.

    Raises:
        RequestError: it is longer than the model's context. It is no ``PromptTooLong``, because a
            shorter prompt would not help.
    """
    vocabulary, context = model.vocabulary, model.info.max_context
    try:
        vocabulary.check_chars(len(text), context, "prediction")
    except PromptTooLong as error:
        raise RequestError(str(error), "prediction") from error
    tokens = await vocabulary.encode(text, add_special_tokens=False, param="prediction")
    if len(tokens) > context:
        raise RequestError(
            f"prediction: {len(tokens)} tokens; this model's maximum context length is {context} "
            "tokens",
            "prediction",
        )
    return tokens
