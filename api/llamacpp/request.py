"""The bodies of llama.cpp's routes, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from chairlift.api.schemas.field_types import Ignored, only
from chairlift.api.schemas.messages import Messages
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import GenerationRequest
from chairlift.api.schemas.templating import Templating


class ApplyTemplateRequest(Templating):
    """POST /apply-template: a conversation as in a chat request."""

    model: str | None = None
    messages: Messages

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        self.check_end(self.messages)
        return self


class InfillExtra(Request):
    """Text of another file, before the text around the gap."""

    filename: Annotated[str, Field(max_length=1024)] = ""
    text: str


class InfillRequest(GenerationRequest):
    """POST /infill: the model writes the text between ``input_prefix`` and ``input_suffix``.

    ``prompt`` is the beginning of that text, which the reply continues. ``n_predict`` is another
    name for ``max_tokens``; -1 means what the context has left. ``repeat_penalty`` is another name
    for ``repetition_penalty``.

    Editors always send the ignored fields. The reply's time is limited by ``timeout`` only, and it
    has all fields, whichever ``response_fields`` names.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillExtra] = []
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    n: Annotated[Any, *only(1)] = 1
    stream_options: Annotated[Any, *only()] = None
    samplers: Ignored = None
    n_indent: Ignored = None
    t_max_prompt_ms: Ignored = None
    t_max_predict_ms: Ignored = None
    response_fields: Ignored = None
