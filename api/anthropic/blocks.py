"""The content blocks of a request, as pydantic models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from chairlift.api.schemas.field_types import Ignored
from chairlift.api.schemas.fields import JsonObject, known_kind
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import Name

Content = str | list[dict[str, Any]]
Id = Annotated[str, Field(min_length=1, max_length=256)]


class _BlockInput(Request):
    """The base of all blocks. ``cache_control`` is ignored, because every prefix is cached."""

    cache_control: Ignored = None


class TextBlockInput(_BlockInput):
    type: Literal["text"]
    text: str
    citations: Ignored = None


class Base64Source(Request):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Request):
    type: Literal["url"]
    url: str


ImageSourceInput = Annotated[
    Base64Source | UrlSource,
    Field(discriminator="type"),
    BeforeValidator(known_kind("image sources", "base64", "url")),
]


class ImageBlockInput(_BlockInput):
    type: Literal["image"]
    source: ImageSourceInput

    @property
    def part(self) -> dict[str, Any]:
        """The content part of a chat message."""
        match self.source:
            case Base64Source(media_type=media_type, data=data):
                url = f"data:{media_type};base64,{data}"
            case UrlSource(url=url):
                pass
        return {"type": "image_url", "image_url": {"url": url}}


class PlainTextSource(Request):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


def _as_blocks(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return value


_ShownBlock = Annotated[
    TextBlockInput | ImageBlockInput,
    Field(discriminator="type"),
    BeforeValidator(known_kind("content blocks", "text", "image")),
]


class ContentSource(Request):
    type: Literal["content"]
    content: Annotated[
        list[_ShownBlock],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ShownBlock]),
    ]


def _document_source(value: object) -> object:
    if isinstance(value, dict) and value.get("type") in ("base64", "url", "file"):
        raise ValueError(
            "PDFs and other files are not supported as documents; send their text, as a source of "
            "type text or content"
        )
    return known_kind("document sources", "text", "content")(value)


class DocumentBlockInput(_BlockInput):
    """A text. ``citations`` are ignored: this server's replies have none."""

    type: Literal["document"]
    source: Annotated[
        PlainTextSource | ContentSource,
        Field(discriminator="type"),
        BeforeValidator(_document_source),
    ]
    title: str | None = None
    context: str | None = None
    citations: Ignored = None

    @property
    def content(self) -> Content:
        """The title, the context and the document, with blank lines between them."""
        match self.source:
            case PlainTextSource(data=text):
                shown: Content = text
            case ContentSource(content=blocks):
                shown = _content_of_shown(blocks)
        return joined([self.title or "", self.context or "", shown], "\n\n")


class RedactedThinkingBlockInput(_BlockInput):
    """Another server's reasoning, encrypted for that server only: it is left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


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


_TextBlock = Annotated[TextBlockInput, BeforeValidator(known_kind("content blocks", "text"))]
TextBlocks = Annotated[
    list[_TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_TextBlock])
]


_ResultBlock = Annotated[
    TextBlockInput | ImageBlockInput | DocumentBlockInput,
    Field(discriminator="type"),
    BeforeValidator(known_kind("content blocks", "text", "image", "document")),
]
ResultBlocks = Annotated[
    list[_ResultBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ResultBlock]),
]


class ToolResultBlockInput(_BlockInput):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: ResultBlocks = []
    is_error: bool = False
    toolset_name: Ignored = None


Block = Annotated[
    TextBlockInput
    | ImageBlockInput
    | DocumentBlockInput
    | ThinkingBlockInput
    | RedactedThinkingBlockInput
    | ToolUseBlockInput
    | ToolResultBlockInput,
    Field(discriminator="type"),
    BeforeValidator(
        known_kind(
            "content blocks",
            *("text", "image", "document", "thinking", "redacted_thinking"),
            *("tool_use", "tool_result"),
        )
    ),
]
Blocks = Annotated[
    list[Block],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


def content_of(blocks: Sequence[TextBlockInput | ImageBlockInput | DocumentBlockInput]) -> Content:
    """The content of a chat message: the joined texts, or parts if there are images.

    Blank lines separate a document from what is around it.
    """
    contents: list[Content] = []
    shown: list[TextBlockInput | ImageBlockInput] = []
    for block in blocks:
        if isinstance(block, DocumentBlockInput):
            contents += [_content_of_shown(shown), block.content]
            shown = []
        else:
            shown.append(block)
    return joined([*contents, _content_of_shown(shown)], "\n\n")


def _content_of_shown(blocks: Sequence[TextBlockInput | ImageBlockInput]) -> Content:
    texts = [block for block in blocks if isinstance(block, TextBlockInput)]
    if len(texts) == len(blocks):
        return text_of(texts)
    return [
        {"type": "text", "text": block.text} if isinstance(block, TextBlockInput) else block.part
        for block in blocks
    ]


def joined(contents: Sequence[Content], separator: str) -> Content:
    """Several contents as one, with ``separator`` between those that are not empty."""
    if all(isinstance(content, str) for content in contents):
        # NOTE: join all texts at once; appending one by one takes quadratic time.
        return separator.join(str(content) for content in contents if content)
    parts: list[dict[str, Any]] = []
    for content in contents:
        if parts and content:
            parts.append({"type": "text", "text": separator})
        if not isinstance(content, str):
            parts += content
        elif content:
            parts.append({"type": "text", "text": content})
    return parts


def text_of(blocks: Sequence[TextBlockInput]) -> str:
    """The concatenated texts of the blocks."""
    return "".join(block.text for block in blocks)
