"""Reads a request's body for the ingress: its model, its prompt, and whether it needs state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from chairlift.api.schemas.decoding import without_mark

# Two prompts with the same first characters are the same to the router, whose tree compares them
# character by character in Python: longer texts would cost more than they tell.
MAX_PROMPT_CHARS = 8192
# The replica reads the body again, in a process of its own if it is large.
_MAX_DEPTH = 8
# For requests without a prompt. The router divides by the length of the text.
NO_PROMPT = " "


class Body(msgspec.Struct):
    """The fields that routing needs, of all APIs. Others are skipped without being converted.

    Fields that come before the conversation in a rendered prompt come first here.
    """

    model: Any = None
    name: Any = None
    previous_response_id: Any = None
    background: Any = None
    cache_salt: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    system: Any = None
    instructions: Any = None
    messages: Any = None
    input_prefix: Any = None
    prompt: Any = None
    input: Any = None
    content: Any = None

    @property
    def model_name(self) -> str | None:
        """The model that the request names, or None."""
        return next((name for name in (self.model, self.name) if isinstance(name, str)), None)

    @property
    def needs_state(self) -> str | None:
        """The field by which the request needs what an earlier one left behind, or None."""
        if self.previous_response_id is not None:
            return "previous_response_id"
        return "background" if self.background is True else None

    def prompt_text(self) -> str:
        """The first ``MAX_PROMPT_CHARS`` characters of the prompt; never empty."""
        pieces: list[str] = []
        length = 0
        for piece in self._pieces():
            pieces.append(piece[: MAX_PROMPT_CHARS - length])
            length += len(pieces[-1])
            if length == MAX_PROMPT_CHARS:
                break
        return "".join(pieces) or NO_PROMPT

    def _pieces(self) -> Iterator[str]:
        yield from _texts(self.cache_salt)
        # A character of UTF-8 has 4 bytes at most.
        yield bytes(memoryview(self.tools)[: 4 * MAX_PROMPT_CHARS]).decode("utf-8", "replace")
        for value in (
            *(self.system, self.instructions, self.messages, self.input_prefix),
            *(self.prompt, self.input, self.content),
        ):
            yield from _texts(value)


_decoder = msgspec.json.Decoder(Body)


def read_body(body: bytes) -> Body:
    """The body's fields. A body that is no JSON object has none: the replica refuses it."""
    try:
        return _decoder.decode(without_mark(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Body()


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    """The texts in a string, token ids, a list of these, or messages with nested content."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):
        yield f"{value} "
    elif depth < _MAX_DEPTH:
        if isinstance(value, list):
            for item in value:
                yield from _texts(item, depth + 1)
        elif isinstance(value, dict):
            for key in ("role", "type", "name", "arguments", "text", "content", "output"):
                yield from _texts(value.get(key), depth + 1)
