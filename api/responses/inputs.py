"""The items that a request may hold, as pydantic models; each becomes one of ``items``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from chairlift.api.fields import MAX_TOKENS, known_kind
from chairlift.api.messages import MAX_MESSAGES
from chairlift.api.request import Request
from chairlift.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    new_id,
)
from chairlift.api.tools import Name

Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(Request):
    type: Literal["input_text"]
    text: str


class OutputTextPart(Request):
    """A part of an earlier reply; its annotations and log-probabilities tell the model nothing."""

    type: Literal["output_text"]
    text: str
    logprobs: Annotated[list[Any], Field(max_length=MAX_TOKENS), AfterValidator(lambda _: [])] = []


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
    InputTextPart | OutputTextPart,
    Field(discriminator="type"),
    BeforeValidator(known_kind("content parts", "input_text", "output_text")),
]
Parts = Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part])]


class MessageInput(Request):
    """A message; ``type`` may be left out. ``phase`` is OpenAI's own and tells nothing here."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Id | None = None
    status: Status | None = None
    phase: str | None = None

    def item(self) -> MessageItem:
        """As it is stored: a reply's text is output, any other's is input."""
        kind = OutputText if self.role == "assistant" else InputText
        content: list[InputText | OutputText] = [kind(part.text) for part in self.content]
        return MessageItem(self.id or new_id("msg"), self.role, content)


class FunctionCallInput(Request):
    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: str
    id: Id | None = None
    status: Status | None = None

    def item(self) -> FunctionCallItem:
        """As it is stored."""
        return FunctionCallItem(self.id or new_id("fc"), self.call_id, self.name, self.arguments)


class FunctionCallOutputInput(Request):
    type: Literal["function_call_output"]
    call_id: Id
    output: Parts
    id: Id | None = None
    status: Status | None = None

    def item(self) -> FunctionCallOutputItem:
        """As it is stored."""
        return FunctionCallOutputItem(
            self.id or new_id("fco"), self.call_id, "".join(part.text for part in self.output)
        )


class ReasoningInput(Request):
    """What a model thought. Encrypted thoughts are another server's, and cannot be read here."""

    type: Literal["reasoning"]
    content: list[ReasoningTextPart] = []
    summary: list[SummaryTextPart] = []
    id: Id | None = None
    status: Status | None = None
    encrypted_content: str | None = None

    def item(self) -> ReasoningItem:
        """As it is stored."""
        return ReasoningItem(
            self.id or new_id("rs"),
            [ReasoningText(part.text) for part in self.content],
            [SummaryText(part.text) for part in self.summary],
        )


_check_kind = known_kind(
    "input items", "message", "function_call", "function_call_output", "reasoning"
)


def _item(value: object) -> object:
    if isinstance(value, dict) and "role" in value:
        value = {**value, "type": value.get("type") or "message"}
    return _check_kind(value)


InputItem = Annotated[
    MessageInput | FunctionCallInput | FunctionCallOutputInput | ReasoningInput,
    Field(discriminator="type"),
    BeforeValidator(_item),
]


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value


Input = Annotated[
    list[InputItem],
    Field(max_length=MAX_MESSAGES),
    BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
]


def items_of(given: Iterable[InputItem]) -> list[Item]:
    """A request's input as it is stored."""
    return [one.item() for one in given]
