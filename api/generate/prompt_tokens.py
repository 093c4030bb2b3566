"""Converts a request's prompt, text or token ids, to the token ids for the engine."""

from __future__ import annotations

from chairlift.api.schemas.fields import Prompt
from chairlift.api.service import ServedModel


async def prompt_tokens(
    model: ServedModel, prompt: Prompt, add_special_tokens: bool, param: str
) -> list[int]:
    """The token ids of ``prompt``; ``param`` is the name of its field, for errors.

    Raises:
        PromptTooLong: the text cannot fit the context.
        RequestError: a token id is not in the model's vocabulary.
    """
    vocabulary, context = model.vocabulary, model.info.max_context
    if isinstance(prompt, str):
        vocabulary.check_chars(len(prompt), context, param)
        return await vocabulary.encode(prompt, add_special_tokens, param)
    if len(prompt) <= context:
        vocabulary.check_ids(prompt, param)
    return prompt
