"""The parameters of ``/set``: the fields of a chat request that the conversation leaves free.

NOTE: The request's model is imported inside functions, because few conversations use it and its
import takes a third of the command's start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from chairlift.api.cli.chat.client import ChatError

# The conversation sets these itself, or cannot show what they ask for.
_NOT_SETTABLE = {
    "messages",
    "model",
    "stream",
    "stream_options",
    "n",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "logprobs",
    "top_logprobs",
}


@cache
def names() -> list[str]:
    """The parameters' names, in alphabetical order."""
    from chairlift.api.schemas.schemas import ChatRequest

    return sorted(ChatRequest.model_fields.keys() - _NOT_SETTABLE)


def value_of(text: str) -> Any:
    """The value that ``text`` writes: JSON if it is JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def check(fields: Mapping[str, Any]) -> None:
    """Checks ``fields`` as the server does.

    Raises:
        ChatError: a name is no parameter, or a value is invalid.
    """
    from pydantic import ValidationError

    from chairlift.api.errors import problem_of
    from chairlift.api.schemas.schemas import ChatRequest, parse
    from chairlift.engine.errors import RequestError

    for name in fields:
        if name not in names():
            raise ChatError(f"{name!r} is no parameter; /set lists those that are")
    request = {**fields, "messages": [{"role": "user", "content": "-"}]}
    try:
        parse(ChatRequest, json.dumps(request).encode())
    except (RequestError, ValidationError) as error:
        raise ChatError(problem_of(error).message) from error
