"""The content blocks of a request, as pydantic models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from chairlift.api.schemas.field_types import Ignored
from chairlift.api.schemas.fields import JsonObject, known_kind
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import Name

Id = Annotated[str, Field(min_length=1, max_length=256)]


class _BlockInput(Request):
    """The base of all blocks. ``cache_control`` is ignored, because every prefix is cached."""

    cache_control: Ignored = None


class TextBlockInput(_BlockInput):
    type: Literal["text"]
    text: str
    citations: Ignored = None


class ThinkingBlockInput(_BlockInput):
    """The model's reasoning. Its signature is not checked, since this server signs none."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlockInput(_BlockInput):
    type: Literal["tool_use"]
    id: Id
    name: Name
    input: JsonObject
    caller: Ignored = None
    toolset_name: Ignored = None


def _as_blocks(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value


_TextBlock = Annotated[TextBlockInput, BeforeValidator(known_kind("content blocks", "text"))]
TextBlocks = Annotated[
    list[_TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_TextBlock])
]


class ToolResultBlockInput(_BlockInput):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: TextBlocks = []
    is_error: bool = False
    toolset_name: Ignored = None


Block = Annotated[
    TextBlockInput | ThinkingBlockInput | ToolUseBlockInput | ToolResultBlockInput,
    Field(discriminator="type"),
    BeforeValidator(known_kind("content blocks", "text", "thinking", "tool_use", "tool_result")),
]
Blocks = Annotated[
    list[Block],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


def text_of(blocks: Sequence[TextBlockInput]) -> str:
    """The concatenated texts of the blocks."""
    return "".join(block.text for block in blocks)
