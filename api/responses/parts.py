"""The content parts of messages and tool outputs in a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from chairlift.api.schemas.field_types import Ignored, only
from chairlift.api.schemas.fields import MAX_TOKENS, known_kind
from chairlift.api.schemas.images import Detail
from chairlift.api.schemas.request import Request


class InputTextPart(Request):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Ignored = None

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return self.text


class InputImagePart(Request):
    """An image by its URL; files of OpenAI's servers are not supported."""

    type: Literal["input_image"]
    # Before image_url, which such a part lacks: the first error is the reply.
    file_id: Annotated[Any, *only()] = None
    image_url: str
    detail: Detail = "auto"
    prompt_cache_breakpoint: Ignored = None

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return ""


class OutputTextPart(Request):
    """Text of an earlier reply. Its annotations and log-probabilities are dropped."""

    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Annotated[list[Any], Field(max_length=MAX_TOKENS), AfterValidator(lambda _: [])] = []

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return self.text


class RefusalPart(Request):
    """A refusal by another server's model."""

    type: Literal["refusal"]
    refusal: str

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return self.refusal


class ReasoningTextPart(Request):
    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(Request):
    type: Literal["summary_text"]
    text: str


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    return value


Part = Annotated[
    InputTextPart | InputImagePart | OutputTextPart | RefusalPart,
    Field(discriminator="type"),
    BeforeValidator(
        known_kind("content parts", "input_text", "input_image", "output_text", "refusal")
    ),
]
Parts = Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part])]


def text_of(parts: Sequence[InputTextPart | InputImagePart | OutputTextPart | RefusalPart]) -> str:
    """The concatenated texts of the parts."""
    return "".join(part.shown for part in parts)
