"""Converts a request's prompt, text or token ids, to the engine's token ids."""

from __future__ import annotations

from chairlift.api.schemas.fields import Prompt
from chairlift.api.service import ServedModel


async def prompt_tokens(
    model: ServedModel, prompt: Prompt, add_special_tokens: bool, param: str
) -> list[int]:
    """The prompt's token ids; ``param`` names its field.

    Raises:
        PromptTooLong: the text is longer than any that fits the context.
        RequestError: the model has no token of that id.
    """
    vocabulary, context = model.vocabulary, model.info.max_context
    if isinstance(prompt, str):
        vocabulary.check_chars(len(prompt), context, param)
        return await vocabulary.encode(prompt, add_special_tokens, param)
    if len(prompt) <= context:
        vocabulary.check_ids(prompt, param)
    return prompt
