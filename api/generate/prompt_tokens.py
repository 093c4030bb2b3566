"""A prompt as a request gives it, text or token ids, as the engine takes it."""

from __future__ import annotations

from chairlift.api.schemas.fields import Prompt
from chairlift.api.service import ServedModel


async def prompt_tokens(
    model: ServedModel, prompt: Prompt, add_special_tokens: bool, param: str
) -> list[int]:
    """Its token ids; ``param`` names its field.

    Raises:
        PromptTooLong: the text is longer than any that fits the context.
        RequestError: the model has no such token.
    """
    vocabulary, context = model.vocabulary, model.info.max_context
    if isinstance(prompt, str):
        vocabulary.check_chars(len(prompt), context, param)
        return await vocabulary.encode(prompt, add_special_tokens, param)
    if len(prompt) <= context:
        vocabulary.check_ids(prompt, param)
    return prompt
